"""``python -m ddprun.healthcheck``: whether the ddprun of this container answers. The image's HEALTHCHECK.

It finds its node as an outsider does: by who holds a node's lock. Standard library and ddpwire only.
"""

import contextlib
import sys
import urllib.request
from pathlib import Path

from ddpwire.folder import LOCK, NODE
from ddpwire.node import read_node

TIMEOUT_S = 5.0


def main() -> int:
    """0 with a line that says how the node fares, or 1 with one that says what is wrong."""
    node_dirs = held(Path("/proc"))
    if not node_dirs:
        print("no ddprun runs here")
        return 1
    wrong = [complaint for path in node_dirs if (complaint := complaint_of(path))]
    print("; ".join(wrong) or f"{len(node_dirs)} ddprun well")
    return 1 if wrong else 0


def held(proc: Path) -> set[Path]:
    """The folders of the nodes whose lock a process of this container holds."""
    found = set()
    for link in proc.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process, or its descriptor, is gone, or not ours to see
            target = link.readlink()
            if target.name == LOCK:
                found.add(target.parent)
    return found


def complaint_of(node_dir: Path) -> str:
    """What is wrong with a node; empty: nothing. One that has no metrics yet is still on its way, and well."""
    try:
        url = read_node((node_dir / NODE).read_text()).metrics
        if url is not None:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - ddprun's own http
                answer.read()
    except (OSError, ValueError) as error:
        return f"{node_dir.name}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
