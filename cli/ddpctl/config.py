"""ddpctl.yaml and flags → Settings: which job, on which target. Touches one file.

Flag > file > default; a profile is laid over the file's job. Everything in the file is checked, also the
targets and profiles that are not in use, and all that is wrong is said at once: a line each, with file,
line and column. pydantic is imported here alone, and only where there is a value to check.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ddpctl.errors import FileError, NoInputError, UsageError
from ddpctl.fields import Field, field_docs, fields_of
from ddpctl.schema import FILE_NAME, Kinds, schema
from ddpctl.spec import JobSpec
from ddpctl.words import one_line, quote, unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from ddpctl.config_file import File
    from ddpctl.yaml_source import Source

__all__ = ["FILE_NAME", "Kinds", "Settings", "field_docs", "find_file", "load", "schema"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a command works with."""

    job: JobSpec
    target: str  # its name in the file, or the kind itself
    kind: str
    options: Any  # the kind's options dataclass, filled
    why: str  # what chose the target: "--target", the file's name, the default's reason; and how, if by its kind
    file: Path | None


def find_file(given: Path | None, cwd: Path) -> Path | None:
    """The file to load: the given one (-f, DDPCTL_FILE), else ddpctl.yaml in ``cwd`` if it is there.

    Relative where ``cwd`` is the process's own, as errors name it. Raises NoInputError where the given one is missing.
    """
    if given is not None and not os.path.lexists(given):
        raise NoInputError(one_line(f"{given}: there is no such file"))
    found = Path(FILE_NAME) if cwd == Path.cwd() else cwd / FILE_NAME
    return given if given is not None else found if os.path.lexists(found) else None


def load(
    *,
    file: Path | None,
    profile: str | None,
    target: str | None,
    overrides: Mapping[str, Any],
    kinds: Kinds,
    default_kind: str = "local",
    default_why: str = "the default",
    target_why: str = "--target",
    workload: str | None = None,
) -> Settings:
    """Read the file, lay the profile and the flags over it, choose the target.

    ``overrides`` are fields of JobSpec, ``workload`` an option of the target; None: not given. The env is merged over
    the file's. Raises FileError with a line for every error of file and flags, UsageError where only flags are wrong,
    NoInputError.
    """
    from ddpctl.config_file import File, place, read_file  # imports yaml
    from ddpctl.yaml_source import Source

    said, source = read_file(file, kinds, _check) if file else (File(), Source(name=""))
    file_errors = source.lines()
    flags, flag_errors = _check_flags(overrides)
    if profile is not None and profile not in said.profiles:
        flag_errors.append(one_line(f"--profile: {unknown(profile, 'profile', said.profiles)}"))
    chosen, why = default_kind, default_why
    if target is not None:
        chosen, why = target, target_why
    elif said.target is not None:
        chosen, why = said.target, str(file)
    found = None
    try:
        chosen, how, found = place(chosen, said.targets, kinds)
        why += how
    except ValueError as error:
        if target is not None or not file_errors:
            flag_errors.append(one_line(f"--target: {error}"))
    layers = (said.job, said.profiles.get(profile or "", {}), flags)
    values = {name: value for layer in layers for name, value in layer.items()}
    values["env"] = {name: value for layer in layers for name, value in layer.get("env", {}).items()}
    job = JobSpec(**values)
    options = None
    if found is not None:
        kind, options = found
        try:
            options = _with_workload(kind, options, workload)
        except ValueError as error:
            flag_errors.append(one_line(f"--kind: {error}"))
        given = {*flags, *(["workload"] if workload else [])}
        flag_errors += _report_problems(said, source, job, options, (profile, chosen), given)
        file_errors = source.lines()
    if file_errors:
        raise FileError("\n".join(file_errors + flag_errors))
    if flag_errors or found is None:
        raise UsageError("\n".join(flag_errors))
    return Settings(job=job, target=chosen, kind=found[0], options=options, why=why, file=file)


def _with_workload(kind: str, options: Any, workload: str | None) -> Any:
    """The options with --kind laid over them. Raises ValueError."""
    if workload is None:
        return options
    field = fields_of(options.__class__).get("workload")
    if field is None:
        raise ValueError(f"a target of kind {kind} has no kinds of its own")
    return replace(options, workload=_check(field, workload))


def _report_problems(
    said: "File", source: "Source", job: JobSpec, options: Any, names: tuple[str | None, str], flags: set[str]
) -> list[str]:
    """What the target's options find wrong in the job together with them (their ``problems``).

    Each is reported where its key stands in the file. The lines that belong to flags are returned; what stands
    nowhere, since it is a default, is the target's.
    """
    profile, target = names
    lines = []
    wrong = source.lines()
    for key, text in getattr(options, "problems", lambda _: ())(job):
        section, _, name = key.partition(".")
        flag = "kind" if name == "workload" else name.replace("_", "-")
        places = [("profiles", profile or "", name), ("job", name)] if section == "job" else [("targets", target, name)]
        node = next((said.places[place] for place in places if place in said.places), None)
        if name in flags:
            lines.append(one_line(f"--{flag}: {text}"))
        elif node is not None:
            source.report(node, f"{name}: {text}")
        elif not wrong:  # else it may only be what is wrong elsewhere
            where = said.places.get(("targets", target))
            if where is not None:
                source.report(where, f"{name}: {text}")
            else:
                lines.append(one_line(f"--target {target}: {name}: {text}"))
    return lines


def _check_flags(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    values, errors = {}, []
    for name, value in overrides.items():
        if value is None:
            continue
        try:
            values[name] = _check(fields_of(JobSpec)[name], tuple(value) if isinstance(value, list) else value)
        except ValueError as error:
            flag = "-- SCRIPT" if name == "command" else "--" + name.replace("_", "-")
            errors.append(one_line(f"{flag}: {error}"))
    return values, errors


def _check(field: Field, value: Any) -> Any:
    """The value, if it is one that the field may have. Raises ValueError with plain words."""
    if value is None and field.optional:
        return None
    if field.record:  # each entry was checked when it was read
        for rule in field.checks:
            value = rule(value)
        return value
    from pydantic import ValidationError

    try:
        return _adapter(field.base, field.low, field.high, field.checks).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    secret = field.kind in ("list", "table")  # its values may be
    match first["type"]:
        case "greater_than_equal":
            raise ValueError(f"{value} is too small: {field.range_words}")
        case "less_than_equal":
            raise ValueError(f"{value} is too large: {field.range_words}")
        case "value_error":
            said = first["ctx"]["error"]
            raise ValueError(f"{said}" if secret else f"{quote(value)} is not allowed: {said}")
        case "finite_number":
            raise ValueError(f"{value} is not finite; write a number")
        case "literal_error":
            raise ValueError(f"{quote(value)} is none of {', '.join(field.choices)}")
    raise ValueError(f"not {field.type_words}" if secret else f"{quote(value)} is no {field.kind}")


@cache
def _adapter(base: Any, low: Any, high: Any, checks: tuple[Callable[[Any], Any], ...]) -> "TypeAdapter[Any]":
    from annotated_types import Ge, Le
    from pydantic import AfterValidator, ConfigDict, TypeAdapter

    limits = [note(limit) for note, limit in ((Ge, low), (Le, high)) if limit is not None]
    annotation: Any = Annotated[base, *limits, *map(AfterValidator, checks), None]
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
