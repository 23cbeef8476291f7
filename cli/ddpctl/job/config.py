"""Reads ddpctl.yaml and the flags, and determines which job to run on which target.

A flag overrides the file, and the file overrides the default. A profile overrides the job of the file. The complete
file is checked, including unused targets and profiles. All errors are reported together, each on one line with its
file, line and column. Duplicate keys, merge keys, tags and deep nesting are errors.
"""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from yaml.reader import Reader

from ddpctl.errors import FileError, NoInputError, UsageError
from ddpctl.job.launch_plan import Request
from ddpctl.job.schema import FILE_NAME, SECTIONS, Kinds, required, validate
from ddpctl.job.spec import JobSpec
from ddpctl.job.values import Text, bases_of, is_null, kind_of, read_text
from ddpctl.text import either, one_line, quote, unknown
from ddpwire.run_files import open_regular

ChosenTarget = tuple[str, Any]  # a target's kind and options
Place = tuple[int, int]  # line and column, both counted from 1
HERE = "local"  # this machine; the name never selects another target of the kind local
FLAGS = {"command": "-- SCRIPT", "mounts": "--mount", "workload": "--kind"}  # not named after their field


def find_file(given: Path | None, cwd: Path) -> Path | None:
    """Return the file to load: the given file (-f, DDPCTL_FILE), or else ddpctl.yaml in ``cwd`` if it exists.

    Raises NoInputError if the given file is missing.
    """
    if given is not None and not os.path.lexists(given):
        raise NoInputError(one_line(f"{given}: no such file"))
    path = Path(FILE_NAME) if cwd == Path.cwd() else cwd / FILE_NAME  # relative: error messages contain the path
    return given if given is not None else path if os.path.lexists(path) else None


def load(
    *,
    file: Path | None = None,
    kinds: Kinds,
    profile: str | None = None,
    target: str | None = None,
    flags: Mapping[str, Any] = MappingProxyType({}),
    default: tuple[str, str] = (HERE, "the default"),
    earlier: Request | None = None,
) -> Request:
    """Read the file, apply the profile and the flags to it, and choose the target.

    ``flags`` are the values of the given flags, by the field of JobSpec or the option of the target that they set.
    ``env`` is merged with the file's ``env``. ``default`` is the default target and the reason for it. ``earlier`` is
    used in place of a file. Raises FileError if the file has errors, UsageError if only flags have errors, or
    NoInputError.
    """
    parsed = _read_file(file, kinds) if file else _File(name="")
    if earlier:
        targets: dict[str, ChosenTarget | None] = {earlier.target: (earlier.kind, earlier.options)}
        parsed = _File(name="", job=vars(earlier.job), target=earlier.target, targets=targets)
    of_target = {name: text for name, text in flags.items() if name not in bases_of(JobSpec)}
    of_job, errors = _read_flags(JobSpec, {name: text for name, text in flags.items() if name not in of_target})
    no_file = "" if file else f" (there is no {FILE_NAME} in {Path.cwd()})"
    if profile is not None and profile not in parsed.profiles:
        errors.append(one_line(f"--profile: {unknown(profile, 'profile', parsed.profiles)}{no_file}"))
    chosen, source = default
    if target is not None:
        chosen, source = target, "--target"
    elif parsed.target is not None:
        chosen, source = parsed.target, str(file)
    chosen_target = None
    try:
        chosen, how, chosen_target = _choose_target(chosen, parsed.targets, kinds)
        source += how
    except ValueError as error:
        if target is not None or not parsed.errors:
            errors.append(one_line(f"--target: {error}{no_file}"))
    layers = (parsed.job, parsed.profiles.get(profile or "", {}), of_job)
    values = {name: value for layer in layers for name, value in layer.items()}
    values["env"] = {name: value for layer in layers for name, value in layer.get("env", {}).items()}
    job, options = JobSpec(**values), None
    if chosen_target is not None:
        kind, options = chosen_target
        options, wrong = _lay_over(options, of_target, kind, kinds)
        errors += wrong
        job = JobSpec(**{**getattr(options, "job_defaults", {}), **values})
        errors += _report_problems(parsed, job, options, (profile, chosen), of_job.keys() | of_target.keys())
    if parsed.errors:
        raise FileError("\n".join(parsed.lines() + errors))
    if errors or chosen_target is None:
        raise UsageError("\n".join(errors))
    return Request(job=job, target=chosen, kind=chosen_target[0], options=options, target_source=source)


def _flag(name: str) -> str:
    return FLAGS.get(name, "--" + name.replace("_", "-"))


def _read_flags(cls: type, texts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the valid values of flags for the fields of ``cls``, and a line for each wrong one."""
    values, problems = validate(cls, texts)
    return values, [one_line(f"{_flag(problem.field)}: {problem.text}") for problem in problems]


def _lay_over(options: Any, flags: Mapping[str, Any], kind: str, kinds: Kinds) -> tuple[Any, list[str]]:
    """Apply flags to the options of a target. Return the options, and a line for each wrong flag."""
    known = bases_of(options.__class__)
    given = {name: getattr(options, name) for name in required(options.__class__)}
    given |= {name: text for name, text in flags.items() if name in known}
    values, lines = _read_flags(options.__class__, given)
    for name in (name for name in flags if name not in known):
        able = tuple(other for other in kinds if name in bases_of(kinds[other]()))
        lines.append(one_line(f"{_flag(name)}: not allowed with a target of kind {kind}, only with {either(able)}"))
    return replace(options, **values), lines


def _choose_target(
    name: str, targets: Mapping[str, ChosenTarget | None], kinds: Kinds
) -> tuple[str, str, ChosenTarget | None]:
    """Return the name of the target, a note for the user, and the target.

    ``name`` is the name or the kind of a target. If it is a kind, and the file has only one target of this kind, the
    note says so. The returned target is None if its options in the file have errors. Raises ValueError.
    """
    if name in targets:
        return name, "", targets[name]
    if name not in kinds:
        used = [target[0] for target in targets.values() if target]
        usable = [kind for kind in kinds if used.count(kind) == 1 or not required(kinds[kind]())]
        raise ValueError(unknown(name, "target", dict.fromkeys([*targets, *usable])))
    of_kind = [key for key, target in targets.items() if target and target[0] == name and name != HERE]
    if len(of_kind) > 1:
        raise ValueError(f"several targets are of kind {name}: choose {either(tuple(of_kind))}")
    if of_kind:
        return of_kind[0], f": the only target of kind {name}", targets[of_kind[0]]
    if name != HERE and None in targets.values():  # the user may mean a target that has an error
        return name, "", None
    if needed := required(kinds[name]()):
        raise ValueError(f"a target of kind {name} needs {', '.join(needed)}: define the target in {FILE_NAME}")
    return name, "", (name, kinds[name]()())


def _report_problems(
    parsed: "_File", job: JobSpec, options: Any, names: tuple[str | None, str], flags: Collection[str]
) -> list[str]:
    """Call the methods ``problems`` of the job and of the target's options, and report the errors that they return.

    Each error belongs to a key. If a flag set the key, the error is returned as a line. Any other error is added to
    ``parsed`` with the position of the key. If the file does not contain the key, the position of the target is used.
    If the file contains neither, the error is returned as a line. ``flags`` are the fields and options that flags set.
    """
    profile, target = names
    lines = []
    wrong = bool(parsed.errors)
    for key, text in (*job.problems(), *getattr(options, "problems", lambda _: ())(job)):
        section, _, name = key.partition(".")
        places = [("profiles", profile, name), ("job", name)] if section == "job" else [("targets", target, name)]
        place = next((parsed.places[place] for place in places if place in parsed.places), None)
        if name in flags:
            lines.append(one_line(f"{_flag(name)}: {text}"))
        elif place := place or (None if wrong else parsed.places.get(("targets", target))):
            parsed.errors.add((*place, f"{name}: {text}"))
        elif not wrong:  # otherwise another error may have caused it
            lines.append(one_line(f"--target {target}: {name}: {text}"))
    return lines


# The file


@dataclass
class _File:
    name: str  # as the user gave it
    job: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    targets: dict[str, ChosenTarget | None] = field(default_factory=dict)  # (kind, options), or None if it is wrong
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[tuple[Any, ...], Place] = field(default_factory=dict)  # ("job", "gpus") → the place of its value
    keys: dict[tuple[Any, ...], Place] = field(default_factory=dict)  # ("job", "gpus") → the place of its key
    # (line, column, text); a set, because an alias repeats an error
    errors: set[tuple[int, int, str]] = field(default_factory=set)

    def lines(self) -> list[str]:
        return [one_line(f"{self.name}:{line}:{column}: {text}") for line, column, text in sorted(self.errors)]

    def report(self, path: tuple[Any, ...], text: str) -> None:
        self.errors.add((*self.places[path], text))

    def value(self, node: yaml.Node, path: tuple[Any, ...] = ()) -> Any:
        """Convert a node to Text, a list or a dict. Record the position of each value, and report invalid keys."""
        self.places[path] = _place(node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            text = Text(node.value)
            text.quoted = node.style is not None
            return text
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        values: dict[str, Any] = {}
        for key, value in node.value:
            name, place = key.value, _place(key.start_mark)
            if not isinstance(key, yaml.ScalarNode):
                self.errors.add((*place, f"a key is text, not {kind_of(self.value(key, (*path, None)))}"))
            elif name == "<<":
                self.errors.add((*place, "merge keys (<<) are not allowed; use a profile, or write the keys out"))
            elif name in values:
                first = self.keys[*path, name][0]
                self.errors.add((*place, f"{quote(name)} is given twice, first in line {first}"))
            else:
                self.keys[*path, name] = place
                values[name] = self.value(value, (*path, name))
        return values

    def table(self, value: Any, path: tuple[str, ...], name: str) -> dict[str, Any]:
        """Return ``value`` if it is a mapping. Otherwise return an empty mapping.

        Report an error if ``value`` is neither a mapping nor null.
        """
        if isinstance(value, dict):
            return value
        if not is_null(value):
            self.report(path, f"{name} takes keys and values, not {kind_of(value)}")
        return {}

    def fields(self, values: dict[str, Any], path: tuple[str, ...], cls: type, *names: str) -> dict[str, Any]:
        """Return the values that are valid for the fields of the dataclass ``cls``, and report all errors."""
        valid, problems = validate(cls, values, noun=names[0], owner=names[-1])
        for problem in problems:
            place = (self.keys if problem.of_key else self.places)[*path, *problem.place]
            self.errors.add((*place, f"{problem.field}: {problem.text}" if problem.field else problem.text))
        return valid


def _read_file(path: Path, kinds: Kinds) -> _File:
    file = _File(name=str(path))
    root = None
    try:
        root = next(iter(_compose(read_bytes(path))), None)
    except _InvalidYaml as error:
        text, place = error.args
        file.errors.add((*place, text))
    sections = file.table(file.value(root), (), "the file") if root else {}
    for key in sections.keys() - SECTIONS.keys():
        inside = f"{quote(key)} belongs under 'job'" if key in bases_of(JobSpec) else None
        file.errors.add((*file.keys[key,], inside or unknown(key, "key of the file", SECTIONS)))
    job, targets, profiles = (file.table(sections.get(key, {}), (key,), key) for key in ("job", "targets", "profiles"))
    file.job = file.fields(job, ("job",), JobSpec, "a job")
    for name, value in profiles.items():
        place = ("profiles", name)
        table = file.table(value, place, f"profile {quote(name)}")
        file.profiles[name] = file.fields(table, place, JobSpec, "a profile")
    file.targets = {name: _read_target(file, name, value, kinds) for name, value in targets.items()}
    if "target" in sections and not is_null(target := sections["target"]):
        try:
            file.target = read_text(target)
            _choose_target(file.target, file.targets, kinds)
        except ValueError as error:
            file.report(("target",), f"target: {error}")
    return file


def _read_target(file: _File, name: str, value: Any, kinds: Kinds) -> ChosenTarget | None:
    path = ("targets", name)
    values = dict(file.table(value, path, f"target {quote(name)}"))
    if "kind" not in values:
        if isinstance(value, dict) or is_null(value):  # any other value is already reported
            file.report(path, f"target {quote(name)} needs a kind: {either(tuple(kinds))}")
        return None
    try:
        kind = read_text(values.pop("kind"))
        if kind not in kinds:
            raise ValueError(unknown(kind, "kind of target", kinds))
        if name in kinds and kind != name:
            raise ValueError(f"{quote(kind)} is not allowed: a target called {quote(name)} is of that kind")
        options = kinds[kind]()
    except ValueError as error:
        file.report((*path, "kind"), f"kind: {error}")
        return None
    valid = file.fields(values, path, options, f"a target of kind {quote(kind)}", f"target {quote(name)}")
    return (kind, options(**valid)) if valid.keys() >= set(required(options)) else None


# YAML


MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 100_000  # with every alias expanded
_NO_TEXT = re.compile("[\0\ud800-\udfff]")

# Patterns of PyYAML's messages, and the message that replaces each. PyYAML's message may quote a secret of the file.
_PHRASES = (
    (r"mapping values are not allowed", "a ':' is not allowed here; check the indentation, or quote the text"),
    (r"found character '\\t'", "a tab is not allowed; indent with spaces"),
    (r"found character .* cannot start", "text cannot begin with this character; quote it"),
    (r"could not find expected ':'", "a ':' is missing after this key"),
    (r"expected <block end>", "this line does not fit the lines above; check the indentation and the quotes"),
    (r"found undefined alias", "this alias (*) has no anchor (&); quote text that begins with '*'"),
    (r"second occurrence", "this anchor (&) is defined twice"),
    (r"found undefined tag handle|expected ' '", "a tag is not allowed; quote text that begins with '!'"),
    (r"expected ',' or", "a ',' or a closing bracket is missing before this position"),
    (r"but found another document", "the file has several documents; only one is allowed"),
    (r"found unexpected end of stream", "the closing quote of this text is missing"),
    (r"expected the node content", "a value is missing before this position; check the brackets and the quotes"),
)


class _InvalidYaml(Exception):  # noqa: N818 -- its arguments are the message and the position
    pass


class _Loader(yaml.SafeLoader):
    """A YAML loader that limits the depth and the number of nodes. All scalars are text, and tags are errors."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- as PyYAML has it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, int] = {}  # of complete nodes, by id(); an alias has the size of its node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = _place(event.start_mark)
        if self._depth == MAX_DEPTH:
            raise _InvalidYaml(f"nested more than {MAX_DEPTH} deep", place)
        if getattr(event, "tag", None) is not None:
            raise _InvalidYaml("a tag is not allowed; quote text that begins with '!'", place)
        if isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            raise _InvalidYaml("an escape for NUL or for half a character is not allowed", place)
        before = self._count
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._count += 1
            self._sizes[id(node)] = self._count - before
        elif id(node) in self._sizes:
            self._count += self._sizes[id(node)]
        else:
            raise _InvalidYaml("an alias (*) refers to a value that contains it", place)
        if self._count > MAX_VALUES:
            raise _InvalidYaml(f"more than {MAX_VALUES} values after aliases (*) are expanded", place)
        return node


def read_documents(data: bytes) -> Iterator[tuple[Any, Mapping[tuple[Any, ...], Place], list[tuple[int, str]]]]:
    """Yield each document of a YAML file: its value, the position of each part, and a line and a text for each error.

    Scalars are Text. Raises ValueError if the file is not YAML.
    """
    try:
        nodes = _compose(data, many=True)
    except _InvalidYaml as error:
        text, (line, _) = error.args
        raise ValueError(f"line {line}: {text}") from None
    for node in nodes:
        file = _File(name="")
        value = file.value(node)
        yield value, file.places, [(line, text) for line, _, text in sorted(file.errors)]


def _compose(data: bytes, *, many: bool = False) -> list[yaml.Node]:
    if len(data) > MAX_BYTES:
        raise _InvalidYaml(f"the file is larger than {MAX_BYTES} bytes", (1, 1))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        raise _InvalidYaml(f"the byte 0x{data[error.start]:02x} is not UTF-8", _end_of(before)) from None
    if match := Reader.NON_PRINTABLE.search(text):
        raise _InvalidYaml(f"the character U+{ord(match[0]):04X} is not allowed", _end_of(text[: match.start()]))
    loader = _Loader(text)
    try:
        nodes = iter(lambda: loader.check_node() and loader.get_node(), False) if many else [loader.get_single_node()]
        return [node for node in nodes if node]
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark or error.context_mark or loader.get_mark(), error.problem or ""
        message = next((ours for theirs, ours in _PHRASES if re.search(theirs, problem)), f"not YAML: {problem}")
        raise _InvalidYaml(message, _place(mark)) from None
    except (ValueError, OverflowError):  # from PyYAML's chr(), for an escape such as "\UFFFFFFFF"
        raise _InvalidYaml("this escape is not a character", _place(loader.get_mark())) from None


def _place(mark: yaml.Mark) -> Place:
    return mark.line + 1, mark.column + 1


def _end_of(text: str) -> Place:
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def read_bytes(path: Path) -> bytes:
    """Return a regular file, or at most one byte more than a YAML file may have. Raises NoInputError."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise NoInputError(f"{one_line(str(path))}: {getattr(error, 'strerror', None) or error}") from None
