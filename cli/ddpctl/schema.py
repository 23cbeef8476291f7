"""What a ddpctl.yaml may hold: its sections, and their JSON schema for editors. Reads nothing."""

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
# Text is taken as it is written (nodes: 2), so an editor must let other scalars pass.
_JSON_TEXT = {"type": ["string", "number", "boolean"]}


def schema(kinds: Kinds) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of ddpctl.yaml, for editors."""
    targets = []
    for kind, options in kinds.items():
        target = _json_object(options())
        target["properties"] = {"kind": {"const": kind}} | target["properties"]
        required = [field.name for field in fields_of(options()).values() if field.required]
        targets.append(target | {"type": "object", "required": ["kind", *required]})
    sections = {
        "job": _json_object(JobSpec),
        "target": {"type": ["string", "null"]},
        "targets": {"type": ["object", "null"], "additionalProperties": {"oneOf": targets}},
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


def _json_value(field: Field) -> dict[str, Any]:
    kinds: dict[Kind, dict[str, Any]] = {
        "text": _JSON_TEXT,
        "whole number": {"type": "integer"},
        "number": {"type": "number"},
        "truth value": {"type": "boolean"},
        "choice": {"enum": list(field.choices)},
        "list": {"type": ["array", "null"], "items": _JSON_TEXT},
        "table": {"type": ["object", "null"], "additionalProperties": _JSON_TEXT},
    }
    if field.record:
        return {"type": "array", "items": _json_record(field.record)}
    limits = {"minimum": field.low, "maximum": field.high}
    value = kinds[field.kind] | {word: limit for word, limit in limits.items() if limit is not None}
    return {"anyOf": [value, {"type": "null"}]} if field.optional else value
