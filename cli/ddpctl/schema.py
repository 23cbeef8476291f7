"""What a ddpctl.yaml may hold: its sections, and their JSON schema for editors. Reads nothing."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ddpctl.fields import Field, Kind, fields_of
from ddpctl.spec import JobSpec

FILE_NAME = "ddpctl.yaml"
Kinds = Mapping[str, Callable[[], type]]  # kind → a function that imports and returns its options dataclass

SECTIONS = {
    "job": "What runs, on how many nodes and GPUs.",
    "target": "The target that is meant when none is given: a name of targets, or a kind.",
    "targets": "Places to run, by name: a kind and its options.",
    "profiles": "Keys of job, by name; --profile NAME lays them over job (env is merged).",
}
# Text is taken as it is written, so an editor must let other scalars pass: name: 7, env: {DEBUG: true}.
_JSON_TEXT = {"type": ["string", "number"]}
_JSON_VALUE = {"type": ["string", "number", "boolean"]}


def schema(kinds: Kinds) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of ddpctl.yaml, for editors."""
    branches = []
    for kind, options in kinds.items():
        target = _json_object(options())
        target["properties"] = {"kind": {"const": kind}} | target["properties"]
        required = [field.name for field in fields_of(options()).values() if field.required]
        is_kind = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
        branches.append({"if": is_kind, "then": target | {"type": "object", "required": ["kind", *required]}})
    # Not oneOf: an editor then tells what is wrong with this kind, and not with every other.
    any_target = {
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": list(kinds)}},
        "allOf": branches,
    }
    sections = {
        "job": _json_object(JobSpec),
        "target": {"type": ["string", "null"]},
        "targets": {"type": ["object", "null"], "additionalProperties": any_target},
        "profiles": {"type": ["object", "null"], "additionalProperties": _json_object(JobSpec, defaults=False)},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FILE_NAME,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {name: {"description": text} | sections[name] for name, text in SECTIONS.items()},
    }


def _json_object(cls: type, *, defaults: bool = True) -> dict[str, Any]:
    """The JSON schema of a YAML mapping with the fields of a dataclass."""
    properties = {}
    for field in fields_of(cls).values():
        properties[field.name] = {"description": field.doc, **_json_value(field)}
        if defaults and not field.required:
            default = list(field.default) if field.kind in ("list", "records") else field.default
            properties[field.name]["default"] = default
    return {"type": ["object", "null"], "additionalProperties": False, "properties": properties}


def _json_record(cls: type) -> dict[str, Any]:
    """An entry of records: an object, or text where it has a short form."""
    required = [field.name for field in fields_of(cls).values() if field.required]
    whole = _json_object(cls) | {"type": "object", "required": required}
    return {"anyOf": [{"type": "string"}, whole]} if hasattr(cls, "from_text") else whole


def _json_text(pattern: str) -> dict[str, Any]:
    """Text; of a pattern, and then a number only where one can be of it (nodes: 2, never memory: 64)."""
    if not pattern:
        return _JSON_TEXT
    number = ["integer"] if re.fullmatch(pattern, "1") else []
    return {"type": ["string", *number], "pattern": f"^(?:{pattern})$"} | ({"minimum": 1} if number else {})


def _json_value(field: Field) -> dict[str, Any]:
    kinds: dict[Kind, dict[str, Any]] = {
        "text": _json_text(field.pattern),
        "whole number": {"type": "integer"},
        "number": {"type": "number"},
        "truth value": {"type": "boolean"},
        "choice": {"enum": list(field.choices)},
        "list": {"type": ["array", "null"], "items": _JSON_VALUE},
        "table": {"type": ["object", "null"], "additionalProperties": _JSON_VALUE},
    }
    if field.record:
        return {"type": "array", "items": _json_record(field.record)}
    limits = {"minimum": field.low, "maximum": field.high}
    value = kinds[field.kind] | {word: limit for word, limit in limits.items() if limit is not None}
    return {"anyOf": [value, {"type": "null"}]} if field.optional else value
