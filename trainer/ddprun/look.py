"""A look at a node from outside: what its endpoint answers, and what is in files of its folder."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from ddpwire.folder import NODE
from ddpwire.node import read_node
from ddpwire.regular import open_regular, read_regular

FETCH_S = 5.0


def look(node_dir: Path, files: tuple[str, ...], *, metrics: bool, max_bytes: int) -> dict[str, Any]:
    """The node's time, its metrics (empty: no answer, and why), and the last bytes of those files that there are."""
    seen: dict[str, Any] = {"time": time.time(), "metrics": "", "files": {}, "failure": ""}
    for name in files:
        with contextlib.suppress(OSError):
            seen["files"][name] = _tail(node_dir / name, max_bytes)
    if metrics and (url := _url(node_dir)):
        try:
            seen["metrics"] = _fetch(url)
        except OSError:
            seen["failure"] = f"{url} does not answer"
    return seen


def _tail(path: Path, max_bytes: int) -> str:
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def _url(node_dir: Path) -> str | None:
    with contextlib.suppress(OSError, ValueError):
        return read_node(read_regular(node_dir / NODE).decode()).metrics
    return None


def _fetch(url: str) -> str:
    import urllib.request  # nodectl is started often, and seldom to fetch

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a node of the run needs no proxy
    with opener.open(url, timeout=FETCH_S) as answer:
        text: str = answer.read().decode(errors="replace")
    return text
