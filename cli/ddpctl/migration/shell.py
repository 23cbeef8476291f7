"""Reads a shell script: its simple commands, and their words as far as they are known without running the script.

Variables that the script sets to a known text are replaced. Command substitutions and other variables stay as they are,
with their ``$``. The grammar is POSIX's "Shell Command Language", with bash's arrays.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

# Nested parentheses and braces; bounded, so that reading takes linear time.
_PARENTHESES = r"\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\)){0,500}+\)){0,1000}+\)){0,2000}+\)"
_BRACES = r"\{(?:[^{}\n]|\{[^{}\n]*\}){0,500}+\}"
_SUBSTITUTION = rf"\$(?:{_PARENTHESES}|{_BRACES})|`[^`]{{0,2000}}+`"
_DOUBLE = rf'"(?:\\[\s\S]|{_SUBSTITUTION}|[^"\\])*+"'
_PIECE = rf"\\[^\n]|'[^']*'|{_DOUBLE}|{_SUBSTITUTION}"
_WORD = rf"(?:{_PIECE}|[^\s;&|<>()\\]|\\(?!\n))++"
_ARRAY = re.compile(rf"(?P<name>\w+)\+?=\((?P<items>(?:\s|\\\n|#[^\n]*|{_WORD})*+)\)")
_ITEM = re.compile(rf"#[^\n]*|({_WORD})")
_TOKEN = re.compile(
    rf"(?P<blank>(?:[ \t\r]|\\\r?\n)+|\#[^\n]*)"
    rf"|(?P<redirect>\d*(?:&>>?|>>|>&|<&|<<<|<<-?|>\||[<>])[ \t]*(?:{_WORD})?)"
    rf"|(?P<operator>&&|\|\||;;|[;&|()\n])|(?P<word>{re.sub('[?]P<[a-z]+>', '?:', _ARRAY.pattern)}|{_WORD}|[\s\S])"
)
_DOCUMENT = re.compile(r"^([^#\n]*(?<!<)<<-?[ \t]*(['\"]?)(\w+)\2.*\n)((?:.*\n){0,1000}?\t*\3)$", re.MULTILINE)
_PARTS = re.compile(rf"(?P<piece>{_PIECE})|\$(?P<name>\w+)|(?P<rest>[\s\S])")
_VARIABLE = re.compile(r"\$\{(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?\}", re.DOTALL)
_FIELD = re.compile(rf"(?:{_SUBSTITUTION}|\S)+")
_OPENING = {
    "if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}", "(": ")",
}  # fmt: skip
_BETWEEN = ("then", "else", "elif", "do", "!")


class Statement(NamedTuple):
    """A simple command, not expanded."""

    line: int
    text: str  # its source
    arguments: tuple[str, ...]  # an array with its name is one of them
    redirects: bool = False
    after: str = ""  # |, || or &&, if it stands between the statement before it and this one
    inside: bool = False  # of an if, a loop, a function or a subshell, so it may not run, or run several times


def statements(script: str) -> Iterator[Statement]:
    """Yield the simple commands of a script, without here-documents."""
    script = _DOCUMENT.sub(lambda match: match[1] + "\n" * match[4].count("\n"), script)
    tokens: list[re.Match[str]] = []  # of the next statement
    ends: list[str] = []  # the words that close the blocks around it
    after = ""
    for match in _TOKEN.finditer(script + "\n"):
        if match.lastgroup != "operator":
            tokens += [match] if tokens or match.lastgroup != "blank" else []
            continue
        inside = bool(ends)
        arguments = _without_keywords([token[0] for token in tokens if token.lastgroup == "word"], ends)
        if tokens:
            begin = tokens[0].start()
            end = max(token.end() for token in tokens if token.lastgroup != "blank")
            redirects = any(token.lastgroup == "redirect" for token in tokens)
            line = 1 + script.count("\n", 0, begin)
            yield Statement(line, script[begin:end], tuple(arguments), redirects, after, inside or bool(ends))
        _without_keywords([match[0]], ends)
        tokens, after = [], match[0] if match[0] in ("|", "||", "&&") else ""


def _without_keywords(arguments: list[str], ends: list[str]) -> list[str]:
    """Return a command without the keywords before it. Update the words that close the blocks it is in."""
    while arguments and (arguments[0] in (*_OPENING, *_BETWEEN, "function") or arguments[0] in ends[-1:]):
        keyword, *rest = arguments
        if keyword in ends[-1:]:
            ends.pop()
        elif keyword in _OPENING or (keyword == "function" and rest[-1:] == ["{"]):
            ends.append(_OPENING.get(keyword, "}"))
        if keyword in ("for", "select", "case", "function"):
            break
        arguments = rest
    return arguments


@dataclass
class Variables:
    """The variables of a script whose text is known, and the names of those that are set to an unknown text."""

    known: dict[str, str | list[str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    defaults: list[str] = field(default_factory=list)  # variables whose default was taken

    def assign(self, word: str, *, sure: bool) -> tuple[str, str]:
        """Set a variable by ``NAME=VALUE``, and return its name and text.

        If it is not ``sure`` that the script does so, its text is unknown from here on.
        """
        name, equals, raw = word.partition("=")
        before = self.known.get(name := name.removesuffix("+"), "" if equals else f"${name}")
        value: str | list[str] = self._expand(raw, split=False) if equals else before
        if array := _ARRAY.fullmatch(word):
            value = [part for item in _ITEM.findall(array["items"]) for part in self.expand(item)]
        if word.startswith(f"{name}+=") and type(before) is type(value):
            value = before + value  # type: ignore[operator]
        if equals and sure:
            self.known[name] = value
        elif equals:
            self.known.pop(name, None)
            self.unknown.add(name)
        return name, value if isinstance(value, str) else " ".join(value)

    def expand(self, word: str) -> list[str]:
        """Return the fields of a word, without quotes. What is unknown stays as it is."""
        is_quoted = re.search("['\"]", word) is not None
        return [part for part in self._expand(word).split("\0") if part or is_quoted]

    def _expand(self, word: str, *, quoted: bool = False, split: bool = True) -> str:
        result = ""
        for match in _PARTS.finditer(word):
            piece = match["piece"] or ""
            if match["name"]:
                result += self._value(match["name"], match[0], split=split)
            elif piece.startswith("'") and not quoted:
                result += piece[1:-1]
            elif piece.startswith('"') and not quoted:
                result += self._expand(piece[1:-1].replace("\\\n", ""), quoted=True, split=False)
            elif piece.startswith("\\"):
                result += piece[1:] if not quoted or piece[1] in '$`"\\' else piece
            elif variable := _VARIABLE.fullmatch(piece):
                name, every, operator, default = variable.groups()
                if operator and name not in self.known and name not in self.unknown:
                    self.defaults.append(name)
                    result += (value := self._expand(default, split=split))
                    self.known |= {name: value} if "=" in operator else {}
                else:
                    result += self._value(name, piece, split=split or bool(every))
            else:
                result += self._product(piece) if piece.startswith(("$((", "$(expr ")) else match[0]
        return result

    def _value(self, name: str, text: str, *, split: bool) -> str:
        value = self.known.get(name, text)
        if value is text:
            return text
        fields = value if isinstance(value, list) else _FIELD.findall(value)
        return "\0".join(fields) if split else value if isinstance(value, str) else " ".join(value)

    def _product(self, text: str) -> str:
        """Return a product of numbers, such as ``$((SLURM_NNODES * 4))`` or ``$(expr $A \\* $B)``."""
        factors = re.sub(r"^\$\(+(expr )?|\)+$|[\\${}\s]", "", text).split("*")
        values = [self.known.get(factor, factor) for factor in factors]
        numbers = [int(value) for value in values if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value)]
        return str(prod(numbers)) if len(numbers) == len(factors) else text
