"""Defines ddpctl.yaml: how its values are parsed and checked, its JSON schema, and the file that ``init`` writes.

The pydantic models are created from dataclasses (``spec.fields_of``). A field may be a tuple of frozen dataclasses,
called records. A record may be written as text if its class has a method ``from_text``, which parses the text.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from annotated_types import Ge, Le

from ddpctl.job.spec import Field, JobSpec, Kind, fields_of
from ddpctl.text import quote, unknown

if TYPE_CHECKING:
    from pydantic import BaseModel

# Values. The type of a field determines how a scalar is parsed, so ``nodes: 1:4`` is not 64, and ``env: {DEBUG: on}``
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


def _read_truth(text: Text) -> bool:
    if text in ("true", "false") and not text.quoted:
        return text == "true"
    if meant := _TRUTH.get(text.lower()):
        raise ValueError(f"{quote(text)} is ambiguous in YAML; write {meant}")
    raise ValueError(f"{quote(text)} is not a truth value; write true or false")


def _read_number(text: Text, kind: Kind) -> int | float:
    whole = kind == "whole number"
    if len(text) > _MAX_DIGITS or not (_WHOLE if whole else _NUMBER).fullmatch(text):
        raise ValueError(f"{quote(text)} is not allowed: expected a {kind} in decimal digits, with no leading zeros")
    if text.quoted:
        raise ValueError(f"{quote(text)} is text because of its quotes; write {text}")
    return int(text) if whole else float(text)


def _read(field: Field, value: Any) -> Any:
    """Convert a value from the file to the field's type. Raises ValueError. Pydantic checks the returned value."""
    match field.kind:
        case "list" | "records" if isinstance(value, list):
            return tuple(value)
        case "list" | "table" | "object" if is_null(value):
            return () if field.kind == "list" else {}
        case "object":
            return read_json(value)
        case "records" | "list" | "table":
            return value
    if field.optional and is_null(value):
        return None
    if field.kind in ("text", "choice"):
        return read_text(value)
    if not isinstance(value, Text):
        try:  # the text of a flag, or a Python value
            return (int if field.kind == "whole number" else float)(value) if isinstance(value, str) else value
        except ValueError:
            raise ValueError(f"{quote(value)} is not a {field.kind}") from None
    if is_null(value):
        raise ValueError(f"has no value; write a {field.kind}")
    return _read_truth(value) if field.kind == "truth value" else _read_number(value, field.kind)


@cache
def model_of(cls: type) -> "type[BaseModel]":
    """Return the pydantic model of a dataclass, which parses the values of the file. Unknown keys are errors."""
    from pydantic import ConfigDict, create_model
    from pydantic import Field as ModelField

    fields: dict[str, Any] = {
        name: (_annotation(one), ModelField(... if one.required else one.default, description=one.doc))
        for name, one in fields_of(cls).items()
    }
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model(cls.__name__, __config__=config, **fields)


def _annotation(field: Field) -> Any:
    from pydantic import AfterValidator, BeforeValidator, WithJsonSchema, WrapValidator

    word = Annotated[str, BeforeValidator(read_text)]
    base: Any = {"list": tuple[word, ...], "table": Mapping[str, word]}.get(field.kind, field.base)
    if field.record:
        model: Any = model_of(field.record)
        short = {"json_schema_input_type": str | model} if hasattr(field.record, "from_text") else {}
        base = tuple[Annotated[model, WrapValidator(partial(_read_record, field.record), **short)], ...]
    notes: list[Any] = [Ge(field.low)] * (field.low is not None) + [Le(field.high)] * (field.high is not None)
    notes += [AfterValidator(check if field.kind in _SECRET else partial(_checked, check)) for check in field.checks]
    if schema := _json_text(field):
        notes.append(WithJsonSchema(schema))
    inner: Any = Annotated[base, *notes, None]
    return Annotated[inner | None if field.optional else inner, BeforeValidator(partial(_read, field))]


_SECRET = ("list", "table", "records", "object")  # error messages omit values of these kinds, which may be secrets


def _checked(check: Callable[[Any], Any], value: Any) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{quote(value)} is not allowed: {error}") from None


def _read_record(cls: Any, value: Any, validate: Callable[[Any], "BaseModel"]) -> Any:
    """Parse a record from its keys and values, or from text. Raises ValueError."""
    if isinstance(value, Text) and hasattr(cls, "from_text"):
        return cls.from_text(read_text(value))
    return cls(**_given(validate(value)))


def _given(model: "BaseModel") -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.model_fields_set}


class Problem(NamedTuple):
    """An error in a mapping of the file or in a flag."""

    place: tuple[str | int, ...]  # the keys and indices of the wrong value; empty: the mapping itself
    text: str
    field: str = ""  # the field whose value is wrong; empty: the key or the mapping is wrong
    of_key: bool = False


def validate(
    cls: type, values: Mapping[str, Any], *, what: str = "", owner: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the valid values and all errors. The values have the types of the dataclass's fields.

    ``values`` are from the file (Text, list, dict) or from Python. ``what`` (such as ``a job``) and ``owner`` (such as
    ``target 'a'``) are used in error messages.
    """
    if not values and not any(field.required for field in fields_of(cls).values()):
        return {}, []
    from pydantic import ValidationError

    try:
        return _given(model_of(cls).model_validate(values)), []
    except ValidationError as error:
        problems = [_problem(one, cls, what, owner or what) for one in error.errors(include_url=False)]
    wrong = {problem.place[0] for problem in problems if problem.place}
    rest = {name: value for name, value in values.items() if name not in wrong}
    return validate(cls, rest)[0] if len(rest) < len(values) else {}, problems


def _problem(error: Any, cls: type, what: str, owner: str) -> Problem:
    name, *inner = place = error["loc"]
    field = fields_of(cls).get(name)
    if field is None:
        meant = _ELSEWHERE.get(name.lower())
        text = unknown(name, f"key of {what}", fields_of(cls), meant if meant in fields_of(cls) else None)
        return Problem(place, text, of_key=True)
    if field.record and inner:
        entry = f"an entry of {name}"
        if len(inner) > 1:
            problem = _problem({**error, "loc": inner[1:]}, field.record, entry, entry)
            return problem._replace(place=(name, inner[0], *problem.place))
        if error["type"] == "model_type":
            return Problem(place, f"{entry} takes keys and values, not {kind_of(error['input'])}")
    if error["type"] == "missing":
        return Problem((), f"{owner} needs {quote(name)} ({field.type_words})")
    text = _words(error, field)
    if inner and not field.record:
        text = f"{quote(inner[0]) if field.kind == 'table' else f'item {inner[0] + 1}'} {text}"
    return Problem(place, text, name)


_TAKES = {"list": "a list such as [a, b]", "records": "a list", "table": "keys and values", "object": "keys and values"}


def _words(error: Any, field: Field) -> str:
    value = error["input"]
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "greater_than_equal":
            return f"{value} is too small: expected {field.bounds}"
        case "less_than_equal":
            return f"{value} is too large: expected {field.bounds}"
        case "finite_number":
            return f"{value} is not a finite number"
        case "literal_error":
            return f"{quote(value)} is not one of {', '.join(field.choices)}"
    if isinstance(value, Text | list | dict):
        return f"takes {_TAKES.get(field.kind, f'a {field.kind}')}, not {kind_of(value)}"
    return f"not {field.type_words}" if field.kind in _SECRET else f"{quote(value)} is not a {field.kind}"


# Names that other programs use for keys of a job, and the keys to suggest.
_ELSEWHERE = {
    "replicas": "nodes",
    "workers": "nodes",
    "num_nodes": "nodes",
    "nproc_per_node": "gpus",
    "args": "command",
    "script": "command",
    "environment": "env",
    "volumes": "mounts",
    **dict.fromkeys(("affinity", "annotations", "env_secrets", "image_pull_secrets", "node_selector"), "pod"),
    **dict.fromkeys(("priority_class", "pull", "request_cpus", "request_memory", "scheduler", "spread"), "pod"),
}

FILE_NAME = "ddpctl.yaml"
Kinds = Mapping[str, Callable[[], type]]  # kind → a function that imports and returns its options dataclass
SECTIONS = {
    "job": "What runs, and on how many nodes and GPUs.",
    "target": "The default target: a name in targets, or a kind.",
    "targets": "Targets by name, each with its kind and options.",
    "profiles": "Named sets of job keys; --profile NAME overrides the job with them (env is merged).",
}

# A field of text accepts all scalars, such as name: 7 or env: {DEBUG: true}.
_JSON_VALUE = {"type": ["string", "number", "boolean"]}


def _json_text(field: Field) -> dict[str, Any]:
    if field.kind == "list":
        return {"type": ["array", "null"], "items": _JSON_VALUE}
    if field.kind == "object":
        return {"type": ["object", "null"]}
    if field.kind == "table":
        return {"type": ["object", "null"], "additionalProperties": _JSON_VALUE}
    if field.kind != "text" or not field.pattern:
        return {"type": ["string", "number"]} if field.kind == "text" else {}
    text = {"type": ["string"], "pattern": f"^(?:{field.pattern})$"}
    # Accept a number only if the pattern can match a number, as in nodes: 2, but not memory: 64.
    return text | {"type": ["string", "integer"], "minimum": 1} if re.fullmatch(field.pattern, "1") else text


def json_schema(kinds: Kinds) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of ddpctl.yaml. ``kinds`` are all kinds of targets."""
    branches: list[Any] = []
    parts: dict[str, Any] = {}
    for kind, options in kinds.items():
        schema = _json_object(options())
        parts |= schema.pop("$defs", {})
        schema["properties"] = {"kind": {"const": kind}} | schema["properties"]
        schema |= {"type": "object", "required": ["kind", *schema.get("required", ())]}
        branches.append({"if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]}, "then": schema})
    # With oneOf, an editor would report the errors for all kinds of targets.
    any_target = {"type": "object", "required": ["kind"], "properties": {"kind": {"enum": list(kinds)}}}
    any_target["allOf"] = branches
    profile = _json_object(JobSpec)
    for value in profile["properties"].values():
        del value["default"]
    sections: dict[str, dict[str, Any]] = {
        "job": _json_object(JobSpec),
        "target": {"type": ["string", "null"]},
        "targets": {"type": ["object", "null"], "additionalProperties": any_target},
        "profiles": {"type": ["object", "null"], "additionalProperties": profile},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": FILE_NAME,
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {name: {"description": text} | sections[name] for name, text in SECTIONS.items()},
        "$defs": parts,
    }


def _json_object(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a dataclass. Null is allowed, and means the same as an empty object."""
    return {**_without_titles(model_of(cls).model_json_schema()), "type": ["object", "null"]}


def _without_titles(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {word: _without_titles(part) for word, part in schema.items() if word != "title"}
    return [_without_titles(part) for part in schema] if isinstance(schema, list) else schema


# A test loads each of these targets without the comment signs.
_NOT_IN_STARTER = """\
  # boxes: # machines with SSH and Docker
  #   kind: ssh
  #   hosts: [alice@box1, alice@box2]
  # hpc: # from a login node, or from elsewhere with login:
  #   kind: slurm
  #   partition: gpu
  #   account: my-lab
  # cluster:
  #   kind: kubernetes
  #   namespace: ml
  # t4s: # two T4s of Kaggle, with its client
  #   kind: kaggle
  #   datasets: [someone/their-pictures]
"""


def starter_text(*, gpus: int, cores: int) -> str:
    """Return a commented configuration for a machine with this number of GPUs and CPU cores."""
    ranks = gpus or max(1, min(2, cores))
    machine = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"no GPU, {cores} CPU cores"
    values = {
        "name": "train",
        "nodes": "1",
        "gpus": str(ranks),
        "device": "auto",
        "command": "[]  # for example [train.py, --epochs, 3]",
        "env": "{}  # for example {OMP_NUM_THREADS: 1}",
    }
    job = "".join(f"  # {fields_of(JobSpec)[name].doc}\n  {name}: {value}\n" for name, value in values.items())
    others = ", ".join(name for name in fields_of(JobSpec) if name not in values)
    return f"""\
# What to train and where, for: ddpctl launch. Written by ddpctl init for this machine: {machine}.
# A flag overrides a DDPCTL_* variable, which overrides this file. ddpctl schema prints all its keys.

job:
{job}  # Also: {others}.

# Where the job can run. --target NAME overrides this default.
target: here
targets:
  here:
    kind: local
{_NOT_IN_STARTER}
# Named settings that override the job: ddpctl launch --profile quick
profiles:
  quick:
    gpus: 1
"""
