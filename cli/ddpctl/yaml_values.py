"""A YAML node as the value of a field: the field's kind decides what is read, never YAML's guess.

Text is what stands in the file (``nodes: 1:4`` is not 64, ``on`` is not True). A number or a truth value
must be written so that every reader of YAML takes it for the same one; the rest is refused by name.
Knows fields and nodes; ranges and rules are checked in ``config``.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

from ddpctl.fields import Field
from ddpctl.words import quote
from ddpctl.yaml_source import Source, is_null, kind_of

_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|(0|[1-9][0-9]*)?\.[0-9]+)([eE][-+][0-9]+)?")
_MAX_DIGITS = 40  # int() refuses 4,301 digits, and nothing here needs 20
_TRUTH = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}
_EMPTY = "has no value; write '' if it is to be empty"


def _base_60(text: str) -> int:
    value = 0
    for part in text.lstrip("-+").split(":"):
        value = value * 60 + int(part)
    return -value if text.startswith("-") else value


# What YAML 1.1 takes for something else than a person does (https://yaml.org/type/), and what to say of it.
_TRAPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (r"[-+]?[1-9][0-9]*(:[0-5]?[0-9])+", lambda text: f"would be {_base_60(text)} to YAML (base 60); write the number"),
    (r"[-+]?0[xXbBoO][0-9a-fA-F]+", lambda _: "is not written in base 10; write the number in base 10"),
    (r"[-+]?0[0-9]+\.?[0-9]*", lambda text: f"may be base 8 to YAML; write {re.sub('0+(?=[0-9])', '', text, count=1)}"),
    (r"[-+]?[0-9][0-9_.]*_[0-9_.]*", lambda text: f"holds '_'; write {text.replace('_', '')}"),
    (r"[-+]?[0-9.]+[eE][-+]?[0-9]+", lambda _: "has an exponent, which YAML may take for text; write it out"),
    (r"(?i)true|false|yes|no|on|off", lambda _: "is a truth value to YAML; write a number"),
    (r"(?i)[-+]?\.?(inf|nan)", lambda _: "is not finite; write a number"),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*", lambda _: "is a date to YAML; write a number"),
)


class Refused(Exception):  # noqa: N818 - no error of its own: the error stands in the Source
    """Marks a value that was reported and must not be used."""


def value_of(source: Source, node: yaml.Node, field: Field) -> Any:
    """The value that ``node`` has for ``field``. Raises Refused; what is wrong then stands in ``source``."""
    if field.kind == "list":
        return _list(source, node, field)
    if field.kind == "table":
        return _table(source, node, field)
    if field.optional and is_null(node):
        return None
    try:
        return _scalar(node, field)
    except ValueError as error:
        source.report(node, f"{field.name}: {error}")
        raise Refused from None


def text_of(node: yaml.Node) -> str:
    """The text of a scalar, as it is written. Raises ValueError, which never repeats the text."""
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"takes text, not {kind_of(node)}")
    if node.value == "" and is_null(node):
        raise ValueError(_EMPTY)
    return str(node.value)


def _scalar(node: yaml.Node, field: Field) -> Any:
    if field.kind in ("text", "choice"):
        return text_of(node)
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"takes a {field.kind}, not {kind_of(node)}")
    if is_null(node):
        raise ValueError(f"has no value; write a {field.kind}")
    return _truth(node) if field.kind == "truth value" else _number(node, field)


def _truth(node: yaml.ScalarNode) -> bool:
    text = node.value
    if text in ("true", "false") and node.style is None:
        return bool(text == "true")
    if meant := _TRUTH.get(text.lower()):
        raise ValueError(f"{quote(text)} may be text or a truth value to YAML; write {meant}")
    raise ValueError(f"{quote(text)} is no truth value; write true or false")


def _number(node: yaml.ScalarNode, field: Field) -> int | float:
    text, whole = node.value, field.kind == "whole number"
    plain = node.style is None
    if len(text) <= _MAX_DIGITS:
        # 1e5 and 1.5e5 are text in YAML 1.1 and numbers in 1.2; 1.5e+5 is a number in both.
        if (_WHOLE if whole else _NUMBER).fullmatch(text) and (node.tag.endswith((":int", ":float")) or not plain):
            if not plain:
                raise ValueError(f"{quote(text)} is text because of its quotes; write {text}")
            return int(text) if whole else float(text)
        for pattern, words in _TRAPS if plain else ():
            if re.fullmatch(pattern, text):
                raise ValueError(f"{text} {words(text)}")
    raise ValueError(f"{quote(text)} is no {field.kind}")


def _list(source: Source, node: yaml.Node, field: Field) -> tuple[str, ...]:
    if is_null(node):
        return ()
    if not isinstance(node, yaml.SequenceNode):
        source.report(node, f"{field.name}: takes a list such as [a, b], not {kind_of(node)}")
        raise Refused
    return _texts(source, field, [(f"item {number}", item) for number, item in enumerate(node.value, 1)])


def _table(source: Source, node: yaml.Node, field: Field) -> dict[str, str]:
    entries = list(source.entries(node, f"{field.name}:"))
    texts = _texts(source, field, [(quote(key), value) for key, _, value in entries])
    return dict(zip((key for key, _, _ in entries), texts, strict=True))


def _texts(source: Source, field: Field, labelled: list[tuple[str, yaml.Node]]) -> tuple[str, ...]:
    texts = []
    for label, node in labelled:
        try:
            texts.append(text_of(node))
        except ValueError as error:
            source.report(node, f"{field.name}: {label} {error}")
    if len(texts) < len(labelled):
        raise Refused
    return tuple(texts)
