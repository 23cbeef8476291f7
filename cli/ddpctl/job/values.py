"""The types of the options of ddpctl.yaml, and how they are read from the file, a flag, Python and a run's record.

A class of options is a frozen dataclass that is derived from ``Options``. Pydantic checks it as it is declared, and
takes the documentation of a field from the text below it. Pydantic is imported only when there is a value to check.
"""

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from ddpctl.text import either, quote

# Scalars. The type of a field determines how a scalar is parsed, so ``nodes: 1:4`` is not 64, and ``env: {DEBUG: on}``
# is not true. A number must have a notation that means the same number in all versions of YAML.


class Text(str):
    """A scalar as it is written in the file."""

    quoted = False


def kind_of(value: Any) -> str:
    """Return the kind of a value from ddpctl.yaml, as words for an error message."""
    return "keys and values" if isinstance(value, dict) else "a list" if isinstance(value, list) else "a single value"


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"([-+]?(0|[1-9][0-9]*)(\.[0-9]*([eE][-+][0-9]+)?)?|\.[0-9]+([eE][-+][0-9]+)?)")
_MAX_DIGITS = 40  # int() refuses 4,301 digits, and nothing here needs 20
_TRUTH = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}


def is_null(value: Any) -> bool:
    """Return whether a scalar is empty, ``null`` or ``~``, without quotes."""
    return isinstance(value, Text) and not value.quoted and value in ("", "~", "null", "Null", "NULL")


def read_text(value: Any) -> Any:
    """Return the text of a scalar. A value that is not from the file is returned unchanged.

    Raises ValueError for a list, a dictionary or a missing value.
    """
    if isinstance(value, dict | list):
        raise ValueError(f"takes text, not {kind_of(value)}")
    if value == "" and is_null(value):
        raise ValueError("has no value; write '' for empty text")
    return str(value) if isinstance(value, Text) else value


def read_json(value: Any) -> Any:
    """Return a value from the file with the types of JSON."""
    if isinstance(value, dict):
        return {str(key): read_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [read_json(item) for item in value]
    if not isinstance(value, Text) or value.quoted:
        return str(value) if isinstance(value, Text) else value
    if is_null(value) or value in ("true", "false"):
        return None if is_null(value) else value == "true"
    if len(value) > _MAX_DIGITS or not _NUMBER.fullmatch(value):
        return str(value)
    return int(value) if _WHOLE.fullmatch(value) else float(value)


def _read_number(base: type, value: str) -> int | float:
    if not isinstance(value, Text):  # of a flag
        try:
            return base(value)  # type: ignore[no-any-return]
        except ValueError:
            raise ValueError(f"{quote(value)} is not {words_of(base)}") from None
    if len(value) > _MAX_DIGITS or not (_WHOLE if base is int else _NUMBER).fullmatch(value):
        expected = f"expected {words_of(base)} in decimal digits, with no leading zeros"
        raise ValueError(f"{quote(value)} is not allowed: {expected}")
    if value.quoted:
        raise ValueError(f"{quote(value)} is text because of its quotes; write {value}")
    return base(value)  # type: ignore[no-any-return]


def _read(base: Any, optional: bool, value: Any) -> Any:
    """Convert a value from the file or a flag to what pydantic takes for a type. Raises ValueError."""
    kind = get_origin(base) or base
    if kind is types.UnionType:
        return _read_numbers(base, value)
    if is_null(value) and (optional or kind in (tuple, Mapping)):
        return None if optional else () if kind is tuple else {}
    if base == Mapping[str, Any]:
        return read_json(value)
    if kind in (str, Literal):
        return read_text(value)
    if kind in (int, float, bool) and is_null(value):
        raise ValueError(f"has no value; write {words_of(base)}")
    if kind is bool and isinstance(value, Text):
        if value in ("true", "false") and not value.quoted:
            return value == "true"
        meant = _TRUTH.get(value.lower())
        problem = f"is ambiguous in YAML; write {meant}" if meant else "is not a truth value; write true or false"
        raise ValueError(f"{quote(value)} {problem}")
    if kind in (int, float) and isinstance(value, bool):
        raise ValueError(f"{value} is not {words_of(base)}")
    return _read_number(base, value) if kind in (int, float) and isinstance(value, str) else value


def _read_numbers(base: Any, value: Any) -> Any:
    """Convert a whole number, or a list of them. A flag has it as ``4,2`` or ``[4, 2]``. Raises ValueError."""
    if isinstance(value, str) and re.fullmatch(r"\[[0-9, ]+\]|[0-9 ]*,[0-9, ]*", value):
        numbers = [number.strip() for number in value.strip("[]").split(",")]
        if isinstance(value, Text):
            raise ValueError(f"{quote(value)} is text; write [{', '.join(numbers)}]")
        value = numbers
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in items):
        raise ValueError(f"takes {words_of(base)}, not {kind_of(value)}")
    return [_read(int, False, item) for item in value] if isinstance(value, list) else _read(int, False, value)


# Types. Pydantic calls the methods __get_pydantic_..._schema__ of the objects in a type ``Annotated[...]``.


@dataclass(frozen=True, eq=False)
class Rule:
    """A check of a value. ``check`` returns the value, or raises ValueError with the allowed values."""

    check: Callable[[Any], Any]
    schema: Mapping[str, Any] = field(default_factory=dict)  # what the JSON schema says about it

    def _checked(self, value: Any) -> Any:
        try:
            return self.check(value)
        except ValueError as error:
            if not isinstance(value, str | int | float):  # a message about several values omits them: one may be secret
                raise
            shown = f"{value:g}" if isinstance(value, float) else quote(value)
            raise ValueError(f"{shown} is not allowed: {error}") from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), **self.schema}


def matching(pattern: str, allowed: str) -> Rule:
    """Return the rule that a text, or each item of a list, must match ``pattern``.

    ``allowed`` is the error message, in which ``{}`` is replaced with the text or the item.
    """

    def check(value: Any) -> Any:
        for text in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(pattern, text):
                raise ValueError(allowed.format(text))
        return value

    return Rule(check, {"pattern": pattern})


def between(low: float, high: float = math.inf) -> Rule:
    """Return the rule that a number is at least ``low`` and at most ``high``."""
    bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"

    def check(value: Any) -> Any:
        if not (low <= value <= high and math.isfinite(value)):
            raise ValueError(f"expected {bounds}")
        return value

    return Rule(check, {"minimum": low} | ({} if high == math.inf else {"maximum": high}))


class _FromFile:
    """In the type of each field: reads the value of the file before pydantic checks it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(partial(_read, *_split(source)), handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return _of_editors(handler(schema))


def _of_editors(schema: Any) -> Any:
    """Return the JSON schema of a field that accepts all scalars for text, and null for no values."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_of_editors(part) for part in schema["anyOf"]]}
    kind, pattern = schema.get("type"), schema.get("pattern")
    if kind in ("array", "object"):
        schema.pop("pattern", None)
        return {**schema, "type": [kind, "null"]}
    if kind != "string" or "enum" in schema or "const" in schema:
        return schema
    if not pattern:
        return {**schema, "type": ["string", "number"]}
    # Accept a number only if the pattern can match a number, as in nodes: 2, but not memory: 64.
    numbers = {"type": ["string", "integer"], "minimum": 1} if re.fullmatch(pattern, "1") else {"type": ["string"]}
    return {**schema, **numbers, "pattern": f"^(?:{pattern})$"}


class _Word(_FromFile):
    """In the type of an item of a list or a table: any scalar is text, such as ``env: {DEBUG: true}``."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return {**handler(schema), "type": ["string", "number", "boolean"]}


Word = Annotated[str, _Word()]
Words = tuple[Word, ...]
Table = Mapping[str, Word]


class Options:
    """The base of a dataclass of options. An entry of a list may be text if its class has a method ``from_text``."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = {
        "extra": "forbid",
        "use_attribute_docstrings": True,
    }

    def __init_subclass__(cls) -> None:
        cls.__annotations__ = {name: Annotated[hint, _FromFile()] for name, hint in cls.__annotations__.items()}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        schema, from_text = handler(source), getattr(cls, "from_text", None)
        if from_text is None:
            return schema
        return core_schema.no_info_before_validator_function(
            lambda value: from_text(read_text(value)) if isinstance(value, Text) else value,
            schema,
            json_schema_input_schema=core_schema.union_schema([core_schema.str_schema(), schema]),
        )


def _split(hint: Any) -> tuple[Any, bool]:
    """Return a type without its notes and without None, and whether it allows None."""
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    base, *others = (part for part in parts if part is not types.NoneType)
    base = hint if others else base
    return getattr(base, "__origin__", base) if hasattr(base, "__metadata__") else base, types.NoneType in parts


@cache
def bases_of(cls: type) -> Mapping[str, tuple[Any, bool]]:
    """Return the type of each field without notes and without None, and whether it allows None."""
    hints = get_type_hints(cls)
    return {field.name: _split(hints[field.name]) for field in fields(cls)}


def record_of(base: Any) -> Any:
    """Return the class of the entries of a list of options. Return None for any other type."""
    return next((part for part in get_args(base) if is_dataclass(part)), None)


_WORDS = {int: "a whole number", float: "a number", bool: "a truth value", str: "text", tuple: "a list such as [a, b]"}
_WORDS |= {types.UnionType: "a whole number or a list such as [4, 2]"}


def words_of(base: Any) -> str:
    """Return the values that a type allows, as words for an error message."""
    if get_origin(base) is Literal:
        return either(get_args(base))
    return "a list" if record_of(base) else _WORDS.get(get_origin(base) or base, "keys and values")


def from_record(cls: type, record: Mapping[str, Any]) -> Any:
    """Return options from a run's record, without keys that this version does not know.

    Limits and rules are not checked. Raises ValueError for a value of another type, and TypeError for a missing one.
    """
    values = {}
    for name, (base, optional) in bases_of(cls).items():
        if name in record:
            value = record[name]
            if not (optional if value is None else _holds(base, value)):
                raise ValueError(f"'{name}' is {quote(value)}: expected {words_of(base)}{' or null' * optional}")
            if entry := record_of(base):
                value = tuple(from_record(entry, item) for item in value)
            values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _holds(base: Any, value: Any) -> bool:
    """Return whether a value from JSON has a type."""
    kind, items = get_origin(base) or base, get_args(base)
    if kind is types.UnionType:
        return any(_holds(part, value) for part in items)
    if kind is tuple:
        return isinstance(value, list | tuple) and all(_holds(items[0], item) for item in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and (items[1] is Any or all(_holds(items[1], v) for v in value.values()))
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, Mapping) if is_dataclass(kind) else type(value) is (str if kind is Literal else kind)
