"""What a message must name, whatever its words are."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_names(message: object, *facts: object) -> None:
    """Check that a message has each of these facts as a whole: hosts, paths, options, variables, numbers."""
    text = str(message)
    missing = [fact for fact in map(str, facts) if not re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", text)]
    assert not missing, f"{missing} not in {text!r}"


@contextmanager
def refused(kind: type[BaseException], *facts: object, code: int | None = None) -> Iterator[None]:
    """Expect an error of this kind that names these facts, and has the exit code if one is given."""
    with pytest.raises(kind) as raised:
        yield
    assert code is None or raised.value.code == code  # type: ignore[attr-defined]
    assert_names(raised.value, *facts)
