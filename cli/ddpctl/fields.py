"""What a dataclass's annotations say of its fields: kind, range, choices, documentation.

One reading for the flags' help, the file's errors, the editors' schema and the docs. Knows a few kinds of
values and neither YAML nor pydantic; a field of another kind is a fault of ours. A field may hold records: a tuple of
a frozen dataclass, whose ``from_text``, if it has one, is the short form of an entry.
"""

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le

from ddpctl.spec import Doc, Rule
from ddpctl.words import either

Kind = Literal["text", "whole number", "number", "truth value", "choice", "list", "table", "records"]

_KINDS: dict[Any, Kind] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "truth value",
    tuple[str, ...]: "list",
    Mapping[str, str]: "table",
}
_KIND_WORDS = {
    "truth value": "true or false",
    "list": "list of text",
    "table": "names and their text",
    "records": "list",
}


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of a dataclass; ``base`` is its type without null, rules and documentation."""

    name: str
    kind: Kind
    base: Any
    optional: bool  # whether null is a value
    required: bool
    default: Any  # None where it is required
    doc: str
    choices: tuple[str, ...] = ()
    low: Any = None  # the smallest value; None: no limit
    high: Any = None
    checks: tuple[Callable[[Any], Any], ...] = ()
    pattern: str = ""  # what all of its text looks like; empty: not said
    record: type | None = None  # what each entry of records is

    @property
    def range_words(self) -> str:
        """``from 1 to 64``, or nothing."""
        words = [("from", self.low), ("to" if self.low is not None else "up to", self.high)]
        return " ".join(f"{word} {limit}" for word, limit in words if limit is not None)

    @property
    def type_words(self) -> str:
        """What a person may write: ``whole number from 1 to 64``."""
        words = _KIND_WORDS.get(self.kind, self.kind)
        if self.kind == "choice":
            words = either(self.choices)
        return " ".join(filter(None, (words, self.range_words))) + (" or null" if self.optional else "")

    def holds(self, value: Any) -> bool:
        """Whether a value that JSON kept is of this kind, whatever its range."""
        if value is None:
            return self.optional
        match self.kind:
            case "list":
                return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)
            case "table":
                return isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values())
            case "records":
                return isinstance(value, list | tuple) and all(isinstance(entry, Mapping) for entry in value)
            case "number":
                return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            case "whole number":
                return isinstance(value, int) and not isinstance(value, bool)
            case "truth value":
                return isinstance(value, bool)
        return isinstance(value, str)


class FieldDoc(NamedTuple):
    """A field as help and docs print it."""

    name: str
    type_words: str
    default: Any  # dataclasses.MISSING where a value must be given
    doc: str


@cache
def fields_of(cls: type) -> Mapping[str, Field]:
    """The fields of a dataclass, by name, in their order."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _field(field.name, hints[field.name], _default(field)) for field in dataclass_fields(cls)}


def field_docs(cls: type) -> tuple[FieldDoc, ...]:
    """The fields of a dataclass for help, docs and ``ddpctl init``."""
    return tuple(
        FieldDoc(field.name, field.type_words, MISSING if field.required else field.default, field.doc)
        for field in fields_of(cls).values()
    )


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _field(name: str, hint: Any, default: Any) -> Field:
    annotation, *notes = (hint.__origin__, *hint.__metadata__) if hasattr(hint, "__metadata__") else (hint,)
    optional = get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation)
    base = next(part for part in get_args(annotation) if part is not type(None)) if optional else annotation
    choices = get_args(base) if get_origin(base) is Literal else ()
    record = next((part for part in get_args(base) if is_dataclass(part)), None)
    return Field(
        name=name,
        kind="choice" if choices else "records" if record else _KINDS[base],
        base=base,
        optional=optional,
        required=default is MISSING,
        default=None if default is MISSING else default,
        doc=next((note.text for note in notes if isinstance(note, Doc)), ""),
        choices=choices,
        low=next((note.ge for note in notes if isinstance(note, Ge)), None),
        high=next((note.le for note in notes if isinstance(note, Le)), None),
        checks=tuple(note.check for note in notes if isinstance(note, Rule)),
        pattern=next((note.pattern for note in notes if isinstance(note, Rule)), ""),
        record=record if isinstance(record, type) else None,
    )
