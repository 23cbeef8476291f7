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
_TOKEN = re.compile(
    rf"(?P<blank>(?:[ \t\r]|\\\r?\n)+)|(?P<comment>\#[^\n]*)"
    rf"|(?P<here><<-?[ \t]*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote))"
    rf"|(?P<array>\w+\+?=\()|(?P<redirect>\d*(?:&>>?|>>|>&|<&|<<<|>\||[<>])[ \t]*(?:{_WORD})?)"
    rf"|(?P<operator>&&|\|\||;;|[;&|()\n])|(?P<word>{_WORD})|(?P<other>[\s\S])"
)
_PARTS = re.compile(rf"(?P<piece>{_PIECE})|\$(?P<name>\w+)|(?P<rest>[\s\S])")
_VARIABLE = re.compile(r"\{(\w+)(\[[@*]\])?(?:(:?[-=])(.*))?\}", re.DOTALL)
_FIELD = re.compile(rf"(?:{_SUBSTITUTION}|\S)+")
_OPENING = {
    "if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}", "(": ")",
}  # fmt: skip
_BETWEEN = ("then", "else", "elif", "do", "!")


class Statement(NamedTuple):
    """A simple command, not expanded."""

    line: int
    text: str  # its source
    words: tuple[str, ...]
    redirects: bool = False
    after: str = ""  # |, || or &&, if it stands between the statement before it and this one
    inside: bool = False  # of an if, a loop, a function or a subshell, so it may not run, or run several times


def statements(script: str) -> Iterator[Statement]:
    """Yield the simple commands of a script. An array is one word: ``NAME=(`` and its words, joined by NUL."""
    words: list[str] = []
    ends: list[str] = []  # the words that close the blocks around this position
    array = here = ""
    redirects, after = False, ""
    position = begin = end = 0
    while position <= len(script):
        match = _TOKEN.match(script, position)
        kind, text = (match.lastgroup, match[0]) if match else ("operator", "\n")  # the end of the script
        is_blank = kind in ("blank", "comment")
        begin = begin if words or array or redirects or is_blank else position
        position += len(text)
        redirects = redirects or kind in ("redirect", "here")
        here = match["end"] if match and kind == "here" else here
        if kind == "array":
            array = text
        elif kind in ("word", "other") and array:
            array += f"\0{text}"
        elif kind in ("word", "other") or (array and text == ")"):
            words.append(array or text)
            array = ""
        if kind != "operator" or (array and match):
            end = end if is_blank else position
            continue
        inside = bool(ends)
        words = _without_keywords(words, ends)
        if source := script[begin:end].strip():
            line = 1 + script.count("\n", 0, begin)
            yield Statement(line, source, tuple(words), redirects, after, inside or bool(ends))
        if text in "()":
            _without_keywords([text], ends)
        words, redirects, begin, end = [], False, position, position
        after = text if text in ("|", "||", "&&") else ""
        if here and text == "\n":
            position, here = _end_of_document(script, position, here), ""
        position += 1 if not match else 0


def _end_of_document(script: str, position: int, word: str) -> int:
    """Return the position below a here-document that ends with this word."""
    match = re.compile(rf"^\t*{re.escape(word)}$", re.MULTILINE).search(script, position)
    return match.end() if match else len(script)


def _without_keywords(words: list[str], ends: list[str]) -> list[str]:
    """Return a command without the keywords before it. Update the words that close the blocks it is in."""
    while words and (words[0] in (*_OPENING, *_BETWEEN, "function") or words[0] in ends[-1:]):
        keyword, *rest = words
        if keyword in ends[-1:]:
            ends.pop()
        elif keyword in _OPENING or (keyword == "function" and rest[-1:] == ["{"]):
            ends.append(_OPENING.get(keyword, "}"))
        if keyword in ("for", "select", "case", "function"):
            break
        words = rest
    return words


@dataclass
class Variables:
    """The variables of a script whose text is known, and the names of those that are set to an unknown text."""

    known: dict[str, str | list[str]] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    defaults: list[str] = field(default_factory=list)  # variables whose default was taken

    def set(self, name: str, value: str | list[str], *, sure: bool) -> None:
        """Set a variable. If it is not ``sure`` that the script does so, its text becomes unknown."""
        if sure:
            self.known[name] = value
        else:
            self.known.pop(name, None)
            self.unknown.add(name)

    def expand(self, word: str) -> list[str]:
        """Return the fields of a word, without quotes. What is unknown stays as it is."""
        is_quoted = re.search("['\"]", word) is not None
        return [part for part in self._expand(word).split("\0") if part or is_quoted]

    def text(self, word: str) -> str:
        """Return the value of an assignment, which is not split into fields."""
        return self._expand(word, split=False)

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
            elif piece.startswith("${"):
                variable = _VARIABLE.fullmatch(piece[1:])
                result += self._braces(variable, piece, split=split) if variable else piece
            elif piece.startswith(("$((", "$(expr ")):
                result += self._product(piece)
            else:
                result += match[0]
        return result

    def _braces(self, match: re.Match[str], text: str, *, split: bool) -> str:
        name, every, operator, default = match.groups()
        if operator and name not in self.known and name not in self.unknown:
            self.defaults.append(name)
            value = self._expand(default, split=split)
            if "=" in operator:
                self.known[name] = value
            return value
        return self._value(name, text, split=split or bool(every))

    def _value(self, name: str, text: str, *, split: bool) -> str:
        value = self.known.get(name)
        if value is None:
            return text
        fields = value if isinstance(value, list) else _FIELD.findall(value)
        return "\0".join(fields) if split else value if isinstance(value, str) else " ".join(value)

    def _product(self, text: str) -> str:
        """Return a product of numbers, such as ``$((SLURM_NNODES * 4))`` or ``$(expr $A \\* $B)``."""
        factors = re.sub(r"^\$\(+(expr )?|\)+$|[\\${}\s]", "", text).split("*")
        values = [self.known.get(factor, factor) for factor in factors]
        numbers = [int(value) for value in values if isinstance(value, str) and re.fullmatch("[0-9]{1,6}", value)]
        return str(prod(numbers)) if len(numbers) == len(factors) else text
