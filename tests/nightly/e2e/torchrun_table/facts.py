"""What a script of the table observes, one JSON file a rank in the current folder."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

AT_START = frozenset(sys.modules)  # no module that matters is imported above
FACTS: dict[str, Any] = {}


def fact(name: str, look: Callable[[], object]) -> None:
    """Keep what ``look`` returns, or the exception that it raises."""
    try:
        FACTS[name] = look()
    except Exception as error:
        FACTS[name] = f"{type(error).__name__}: {error}"


def start(main: Mapping[str, Any]) -> None:
    """Keep what the globals ``main`` and sys tell of how the script was started."""
    fact("`__name__`, `__file__`, `__package__`", lambda: [main[f"__{key}__"] for key in ("name", "file", "package")])
    fact(
        "`__spec__`, `__loader__`",
        lambda: [main["__spec__"] and main["__spec__"].name, type(main["__loader__"]).__name__],
    )
    fact("sys.argv, sys.path[0]", lambda: [sys.argv, sys.path[0]])
    save()


def save() -> None:
    """Write the facts of this rank."""
    Path(f"facts-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(FACTS, default=repr))
