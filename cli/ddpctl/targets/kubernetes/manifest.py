"""Objects as text: YAML that all readers of YAML take for the same, and text that Kubernetes leaves alone. Pure."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

Object = dict[str, Any]

_PLAIN = re.compile(r"[A-Za-z/][-A-Za-z0-9_./ ]*[A-Za-z0-9/]|[A-Za-z/]")
# What a reader of YAML 1.1 may take for something else than text (https://yaml.org/type/).
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


class _Dumper(yaml.SafeDumper):
    """Quotes every text that is not plainly text; never writes an alias."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None if _PLAIN.fullmatch(text) and text.lower() not in _WORDS else "'"
    if "\n" in text:
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(objects: Iterable[Object]) -> str:
    """Objects as one stream of YAML documents."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=4096)


def literal(text: str) -> str:
    """Text of an argument or a variable that Kubernetes hands on as it is: ``$(NAME)`` is not expanded."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def variables(values: Mapping[str, str]) -> list[Object]:
    """An environment as Kubernetes spells it."""
    return [{"name": name, "value": literal(value)} for name, value in values.items()]


def drop_empty(value: Object) -> Object:
    """Without the keys that hold nothing."""
    return {key: item for key, item in value.items() if item not in (None, {}, [], "")}
