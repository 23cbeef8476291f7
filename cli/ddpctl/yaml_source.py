"""A YAML file as nodes that know their line and column, and the list of what is wrong in it.

What YAML would pass over in silence or could harm us with is refused by name: a key given twice, merge
keys, tags, nesting without end. Knows nothing of jobs; ``yaml_values`` makes values of the nodes.
"""

import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.reader import Reader

from ddpctl.errors import NoInputError
from ddpctl.words import one_line, quote

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
MAX_VALUES = 100_000  # with every alias unfolded
_NO_TEXT = re.compile("[\0\ud800-\udfff]")

# PyYAML's words, as a pattern, and ours. Its own may repeat a piece of the file, hence maybe a secret.
_PHRASES = (
    (r"mapping values are not allowed", "a ':' is not allowed here; check the indentation, or quote the text"),
    (r"found character '\\t'", "a tab; indent with spaces"),
    (r"found character .* cannot start", "text cannot begin with this character; quote it"),
    (r"could not find expected ':'", "a key without its ':'"),
    (r"expected <block end>", "this does not fit the lines above; check the indentation and the quotes"),
    (r"found undefined alias", "an alias (*) without its anchor (&); quote text that begins with '*'"),
    (r"second occurrence", "this anchor (&) is there twice"),
    (r"found undefined tag handle|expected ' '", "a tag is not allowed; quote text that begins with '!'"),
    (r"expected ',' or", "a ',' or a closing bracket is missing before this"),
    (r"but found another document", "several documents in one file; keep one"),
    (r"found unexpected end of stream", "the quotes of this text are never closed"),
)


class _Refusal(yaml.MarkedYAMLError):
    """A thing that YAML allows and we do not; its text is for the user."""

    def __init__(self, text: str, event: yaml.Event) -> None:
        super().__init__(None, None, text, event.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Composes nodes, bounded in depth and in number; constructs nothing."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0
        self._sizes: dict[int, int] = {}  # of finished nodes, by id(): an alias counts as what it stands for

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self._refuse(event)
        before = self._count
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if not isinstance(event, yaml.AliasEvent):
            self._count += 1
            self._sizes[id(node)] = self._count - before
        elif id(node) in self._sizes:
            self._count += self._sizes[id(node)]
        else:
            raise _Refusal("an alias (*) inside of what it stands for", event)
        if self._count > MAX_VALUES:
            raise _Refusal(f"more than {MAX_VALUES} values, aliases (*) unfolded", event)
        return node

    def _refuse(self, event: yaml.Event) -> None:
        if self._depth == MAX_DEPTH:
            raise _Refusal(f"nested more than {MAX_DEPTH} deep", event)
        if getattr(event, "tag", None) is not None:
            raise _Refusal("a tag is not allowed; quote text that begins with '!'", event)
        if isinstance(event, yaml.ScalarEvent) and _NO_TEXT.search(event.value):
            raise _Refusal("an escape for NUL or for half a character is not allowed", event)


@dataclass
class Source:
    """A file that is being read: its root node, None where it is empty, and what was found wrong so far."""

    name: str  # as the user gave it
    root: yaml.Node | None = None
    _problems: set[tuple[int, int, str]] = field(default_factory=set)

    def report(self, node: yaml.Node, text: str) -> None:
        """Note what is wrong at a node. A second report of the same (through an alias) is dropped."""
        self.report_at(node.start_mark.line + 1, node.start_mark.column + 1, text)

    def report_at(self, line: int, column: int, text: str) -> None:
        """Note what is wrong at a line and a column, both from 1."""
        self._problems.add((line, column, text))

    def lines(self) -> list[str]:
        """All that is wrong, a line each, in the file's order."""
        return [one_line(f"{self.name}:{line}:{column}: {text}") for line, column, text in sorted(self._problems)]

    def entries(self, node: yaml.Node, what: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """The key, its node and the value's node of a mapping; no value at all is an empty mapping."""
        if is_null(node):
            return
        if not isinstance(node, yaml.MappingNode):
            self.report(node, f"{what} takes keys and values, not {kind_of(node)}")
            return
        first: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.report(key, f"a key is text, not {kind_of(key)}")
            elif key.value == "<<":
                self.report(key, "merge keys (<<) are not allowed; use a profile, or write the keys out")
            elif key.value in first:
                self.report(key, f"{quote(key.value)} is there twice, first in line {first[key.value]}")
            else:
                first[key.value] = key.start_mark.line + 1
                yield key.value, key, value


def read(path: Path) -> Source:
    """Read a file. What is no YAML is reported in the Source, whose root is then None.

    Raises NoInputError where there is no file that can be read.
    """
    source = Source(name=str(path))
    data = _bytes_of(path)
    if len(data) > MAX_BYTES:
        source.report_at(1, 1, f"the file is larger than {MAX_BYTES} bytes")
        return source
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start].decode(errors="replace")
        source.report_at(*_end_of(before), f"the byte 0x{data[error.start]:02x} is not UTF-8")
        return source
    if match := Reader.NON_PRINTABLE.search(text):
        source.report_at(*_end_of(text[: match.start()]), f"the character U+{ord(match[0]):04X} is not allowed")
        return source
    _compose(source, text)
    return source


def kind_of(node: yaml.Node) -> str:
    """What a node is, for an error."""
    words: Iterable[tuple[type[yaml.Node], str]] = (
        (yaml.MappingNode, "keys and values"),
        (yaml.SequenceNode, "a list"),
    )
    return next((word for kind, word in words if isinstance(node, kind)), "a single value")


def is_null(node: yaml.Node) -> bool:
    """Whether there is no value, or a plain ``null`` or ``~``."""
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _bytes_of(path: Path) -> bytes:
    try:
        # Not open() alone: that of a pipe would wait for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise NoInputError(f"{one_line(str(path))}: not a regular file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise NoInputError(f"{one_line(str(path))}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL in the path
        raise NoInputError(f"{one_line(str(path))}: {error}") from None


def _end_of(text: str) -> tuple[int, int]:
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def _compose(source: Source, text: str) -> None:
    loader = _Loader(text)
    try:
        source.root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark or loader.get_mark()
        problem = error.problem or ""
        words = next((ours for theirs, ours in _PHRASES if re.search(theirs, problem)), f"not YAML: {problem}")
        source.report_at(mark.line + 1, mark.column + 1, problem if isinstance(error, _Refusal) else words)
    except (ValueError, OverflowError):  # PyYAML's chr() of an escape such as "\UFFFFFFFF"
        mark = loader.get_mark()
        source.report_at(mark.line + 1, mark.column + 1, "an escape for a character that does not exist")
