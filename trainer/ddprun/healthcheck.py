"""``python -m ddprun.healthcheck``, the HEALTHCHECK of the image: checks whether ddprun in this container answers.

It looks for processes that have a node's lock file open, and requests the metrics of these nodes.
"""

import contextlib
import sys
import urllib.request
from pathlib import Path

from ddpwire.run_files import LOCK, NODE, read_node

TIMEOUT_S = 5.0  # less than the time-out of the image's HEALTHCHECK, 10 s


def main() -> int:
    """Print the health of all nodes in one line; return 0 if all are healthy, otherwise 1."""
    node_dirs = locked_nodes(Path("/proc"))
    if not node_dirs:
        print("no ddprun runs here")
        return 1
    problems = [problem for path in node_dirs if (problem := find_problem(path))]
    print("; ".join(problems) or f"{len(node_dirs)} ddprun well")
    return 1 if problems else 0


def locked_nodes(proc: Path) -> set[Path]:
    """Return the folders of the nodes whose lock file is open in a process under ``proc``."""
    folders = set()
    for link in proc.glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process or descriptor no longer exists, or is not visible
            target = link.readlink()
            if target.name == LOCK:
                folders.add(target.parent)
    return folders


def find_problem(node_dir: Path) -> str:
    """Return the problem of a node, or an empty string. A node that has no metrics yet counts as healthy."""
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
