"""Checks the values of ddpctl.yaml by pydantic, and prints its JSON schema and the file that ``init`` writes."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ddpctl.job.spec import JobSpec
from ddpctl.job.values import Text, bases_of, kind_of, record_of, words_of
from ddpctl.text import either, quote, unknown

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@cache
def _adapter(cls: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(cls)


def required(cls: type) -> list[str]:
    """Return the names of the fields without a default."""
    return [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]


class Problem(NamedTuple):
    """An error in a mapping of the file or in a flag."""

    place: tuple[str | int, ...]  # the keys and indices of the wrong value; empty: the mapping itself
    text: str
    field: str = ""  # the field whose value is wrong; empty: the key or the mapping is wrong
    of_key: bool = False


def validate(
    cls: type, values: Mapping[str, Any], *, noun: str = "", owner: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the valid values and all errors. The values have the types of the dataclass's fields.

    ``values`` are from the file (Text, list, dict) or from Python. Without pydantic, they are not checked. ``noun``
    (such as ``a job``) and ``owner`` (such as ``target 'a'``) are used in error messages.
    """
    if not values and not required(cls):
        return {}, []
    try:
        from pydantic import TypeAdapter, ValidationError  # noqa: F401 (an old pydantic has no TypeAdapter)
    except ImportError:  # on a notebook's machine, which may have no network: its values come from Python
        return dict(values), []

    try:
        options = _adapter(cls).validate_python(values)
        return {name: getattr(options, name) for name in values}, []
    except ValidationError as error:
        problems = [_problem(part, cls, noun, owner or noun) for part in error.errors(include_url=False)]
    wrong = {problem.place[0] for problem in problems if problem.place}
    rest = {name: value for name, value in values.items() if name not in wrong}
    return validate(cls, rest)[0] if len(rest) < len(values) else {}, problems


def _problem(error: Any, cls: type, noun: str, owner: str) -> Problem:
    name, *inner = place = error["loc"]
    known = bases_of(cls)
    if name not in known:
        meant = _ELSEWHERE.get(name.lower())
        text = unknown(name, f"key of {noun}", known, meant if meant in known else None)
        if name in ("environment", "wheelhouse") and cls is not JobSpec:
            text = f"only targets of kind ssh and slurm have {name!r}: {_OWN_PACKAGES}"
        return Problem(place, text, of_key=True)
    base, _ = known[name]
    if (entry := record_of(base)) and len(inner) > 1:
        of_list = f"an entry of {name}"
        problem = _problem({**error, "loc": inner[1:]}, entry, of_list, of_list)
        return problem._replace(place=(name, inner[0], *problem.place))
    if error["type"] == "missing":
        return Problem((), f"{owner} needs {quote(name)} ({words_of(base)})")
    text = _words(error, entry if inner and entry else str if inner else base)
    if inner:
        text = f"{quote(inner[0]) if isinstance(inner[0], str) else f'item {inner[0] + 1}'} {text}"
    return Problem(place, text, name)


def _words(error: Any, base: Any) -> str:
    value, takes = error["input"], words_of(base)
    match error["type"]:
        case "value_error":
            return str(error["ctx"]["error"])
        case "literal_error":
            return f"{quote(value)} is not one of {', '.join(get_args(base))}"
    if isinstance(value, Text | list | dict):
        return f"takes {takes}, not {kind_of(value)}"
    # The values of lists and tables may be secrets.
    return f"{quote(value)} is not {takes}" if isinstance(base, type) else f"takes {takes}"


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

_OWN_PACKAGES = "install the packages of the lock in the image, or in the Python that runs ddpctl"
FILE_NAME = "ddpctl.yaml"
Kinds = Mapping[str, Callable[[], type]]  # kind → a function that imports and returns its options dataclass
SECTIONS = {
    "job": "What runs, and on how many nodes and GPUs.",
    "target": "The default target: a name in targets, or a kind.",
    "targets": "Targets by name, each with its kind and options.",
    "profiles": "Named sets of job keys; --profile NAME overrides the job with them (env is merged).",
}


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
        value.pop("default", None)
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


def documentation(name: str, kinds: Kinds) -> str:
    """Return the help of a flag: the documentation of its field, and which kinds of target have the field."""
    having = [kind for kind, options in kinds.items() if name in bases_of(options())]
    cls = kinds[having[0]]() if having else JobSpec
    text = _json_object(cls)["properties"][name]["description"].replace("null: ", "default: ")
    return f"Only for {either(tuple(having))}: {text}" if having else text


def _json_object(cls: type) -> dict[str, Any]:
    """Return the JSON schema of a dataclass. Null is allowed, and means the same as an empty object."""
    schema = {**_plain(_adapter(cls).json_schema()), "type": ["object", "null"]}
    schema.pop("description", None)
    return schema


def _plain(schema: Any) -> Any:
    """Return a schema without titles, and with each description on one line."""
    if isinstance(schema, dict):
        text = {"description": " ".join(schema["description"].split())} if "description" in schema else {}
        return {name: _plain(part) for name, part in schema.items() if name != "title"} | text
    return [_plain(part) for part in schema] if isinstance(schema, list) else schema


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
    known = _json_object(JobSpec)["properties"]
    job = "".join(f"  # {known[name]['description']}\n  {name}: {value}\n" for name, value in values.items())
    others = ", ".join(name for name in known if name not in values)
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
