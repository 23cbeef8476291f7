"""What a ddpctl.yaml says, and all that is wrong in it. Reads one file; what is in use is ``config``'s to say."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ddpctl.fields import Field, fields_of
from ddpctl.schema import FILE_NAME, SECTIONS, Kinds
from ddpctl.spec import JobSpec
from ddpctl.words import either, quote, unknown
from ddpctl.yaml_source import Source, is_null, kind_of, read
from ddpctl.yaml_values import Refused, text_of, value_of

Check = Callable[[Field, Any], Any]
Placed = tuple[str, Any]  # a target's kind and options
HERE = "local"  # this machine, which needs no words of a file: never short for another target of its kind
# What other programs call a job's keys, where the spelling leads nowhere near.
_ELSEWHERE = {
    "replicas": "nodes",
    "workers": "nodes",
    "num_nodes": "nodes",
    "nproc_per_node": "gpus",
    "args": "command",
    "script": "command",
    "environment": "env",
    "volumes": "mounts",
}


@dataclass
class File:
    """What a file says; of what is wrong in it, only that it is there."""

    job: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    targets: dict[str, Placed | None] = field(default_factory=dict)  # (kind, options); None: wrong
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[tuple[str, ...], yaml.Node] = field(default_factory=dict)  # ("job", "gpus") → where it stands


def read_file(path: Path, kinds: Kinds, check: Check) -> tuple[File, Source]:
    """What the file says, and the source, which holds a line for everything that is wrong in it.

    ``check`` takes a field and a value and returns the value or raises ValueError. Raises NoInputError.
    """
    source, said, target = read(path), File(), None
    for key, key_node, node in source.entries(source.root, "the file") if source.root else ():
        if key == "job":
            entries = _noted(said, ("job",), source.entries(node, "job"))
            said.job = _read_fields(source, entries, JobSpec, "a job", check)
        elif key == "target":
            target = None if is_null(node) else node
        elif key == "targets":
            for name, _, part in source.entries(node, "targets"):
                said.places["targets", name] = part
                said.targets[name] = _read_target(source, said, name, part, kinds, check)
        elif key == "profiles":
            for name, _, part in source.entries(node, "profiles"):
                entries = _noted(said, ("profiles", name), source.entries(part, f"profile {quote(name)}"))
                said.profiles[name] = _read_fields(source, entries, JobSpec, "a profile", check)
        else:
            inside = f"{quote(key)} belongs under 'job'" if key in fields_of(JobSpec) else None
            source.report(key_node, inside or unknown(key, "key of the file", SECTIONS))
    if target:
        try:
            said.target = text_of(target)
            place(said.target, said.targets, kinds)
        except ValueError as error:
            source.report(target, f"target: {error}")
    return said, source


def _noted(
    said: File, section: tuple[str, ...], entries: Iterable[tuple[str, yaml.Node, yaml.Node]]
) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
    """The same entries; where they stand is kept for what only several of them together make wrong."""
    for key, key_node, node in entries:
        said.places[*section, key] = node
        yield key, key_node, node


def _read_target(
    source: Source, said: File, name: str, node: yaml.Node, kinds: Kinds, check: Check
) -> tuple[str, Any] | None:
    noted = _noted(said, ("targets", name), source.entries(node, f"target {quote(name)}"))
    entries = {key: (key_node, value) for key, key_node, value in noted}
    if "kind" not in entries:
        if isinstance(node, yaml.MappingNode) or is_null(node):  # else entries() has reported it
            source.report(node, f"target {quote(name)} needs a kind: {either(tuple(kinds))}")
        return None
    _, kind_node = entries.pop("kind")
    try:
        kind = text_of(kind_node)
        if kind not in kinds:
            raise ValueError(unknown(kind, "kind of target", kinds))
        if name in kinds and kind != name:
            raise ValueError(f"{quote(kind)} is not allowed: a target called {quote(name)} is of that kind")
        options = kinds[kind]()
    except ValueError as error:
        source.report(kind_node, f"kind: {error}")
        return None
    given = [(key, *nodes) for key, nodes in entries.items()]
    values = _read_fields(source, given, options, f"a target of kind {quote(kind)}", check)
    required = {field.name for field in fields_of(options).values() if field.required}
    for missing in sorted(required - entries.keys()):
        source.report(node, f"target {quote(name)} needs {quote(missing)}: {fields_of(options)[missing].type_words}")
    return (kind, options(**values)) if required <= values.keys() else None


def _read_fields(
    source: Source, entries: Iterable[tuple[str, yaml.Node, yaml.Node]], cls: type, what: str, check: Check
) -> dict[str, Any]:
    """The fields of ``cls`` that the entries give rightly; what is wrong is reported."""
    fields, values = fields_of(cls), {}
    for key, key_node, node in entries:
        if key not in fields:
            meant = _ELSEWHERE.get(key.lower())
            source.report(key_node, unknown(key, f"key of {what}", fields, meant if meant in fields else None))
            continue
        try:
            field = fields[key]
            read_value = _read_records(source, node, field, check) if field.record else value_of(source, node, field)
            values[key] = check(field, read_value)
        except Refused:
            pass
        except ValueError as error:
            source.report(node, f"{key}: {error}")
    return values


def _read_records(source: Source, node: yaml.Node, field: Field, check: Check) -> tuple[Any, ...]:
    """A list of records, each written as keys and values or in its short form. Raises Refused."""
    if not isinstance(node, yaml.SequenceNode):
        source.report(node, f"{field.name}: takes a list, not {kind_of(node)}")
        raise Refused
    found = [_read_record(source, item, field, check) for item in node.value]
    if any(record is None for record in found):
        raise Refused
    return tuple(found)


def _read_record(source: Source, node: yaml.Node, field: Field, check: Check) -> Any:
    """One record, or None where it is wrong, which is reported."""
    cls, what = field.record, f"an entry of {field.name}"
    assert cls is not None, field  # noqa: S101 -- the caller has looked
    if isinstance(node, yaml.ScalarNode) and (short := getattr(cls, "from_text", None)):
        try:
            return short(text_of(node))
        except ValueError as error:
            source.report(node, f"{field.name}: {error}")
            return None
    values = _read_fields(source, entries := list(source.entries(node, what)), cls, what, check)
    given = {key for key, _, _ in entries}
    required = {name for name, part in fields_of(cls).items() if part.required}
    for missing in sorted(required - given) if isinstance(node, yaml.MappingNode) else ():
        source.report(node, f"{what} needs {quote(missing)}: {fields_of(cls)[missing].type_words}")
    return cls(**values) if required | given <= values.keys() else None


def place(name: str, targets: Mapping[str, Placed | None], kinds: Kinds) -> tuple[str, str, Placed | None]:
    """A target by its name, or by its kind: the file's only one of it, else the kind by itself. Raises ValueError.

    Returns the name that it has, how it was found if by its kind, and None for what is wrong in the file.
    """
    if name in targets:
        return name, "", targets[name]
    if name not in kinds:
        alone = [kind for kind in kinds if not _required(kinds[kind]())]
        raise ValueError(unknown(name, "target", [*targets, *alone]))
    of_kind = [one for one, target in targets.items() if target and target[0] == name and name != HERE]
    if len(of_kind) > 1:
        raise ValueError(f"{name}: several targets are of this kind: write {either(tuple(of_kind))}")
    if of_kind:
        return of_kind[0], f": the only target of kind {name}", targets[of_kind[0]]
    if name != HERE and None in targets.values():  # it may be the one that is meant
        return name, "", None
    if required := _required(kinds[name]()):
        raise ValueError(f"{name} needs {', '.join(required)}; write a target of this kind in {FILE_NAME}")
    return name, "", (name, kinds[name]()())


def _required(options: type) -> list[str]:
    return [field.name for field in fields_of(options).values() if field.required]
