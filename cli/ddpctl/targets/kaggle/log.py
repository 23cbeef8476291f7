"""A program that prints a Kaggle session's log: all lines, the last lines, or the lines of some nodes or ranks.

It reads the JSON that Kaggle's client prints. The target's verb ``logs`` starts it:
``kaggle kernels logs OWNER/NAME | python -m ddpctl.targets.kaggle.log``.
"""

import argparse
import re
import sys

from ddpctl.targets.kaggle.target import plain


def main() -> None:
    """Read a log from stdin, and print the requested lines."""
    parser = argparse.ArgumentParser(prog="ddpctl.targets.kaggle.log")
    parser.add_argument("--tail", type=int)
    parser.add_argument("--rank", type=int, action="append", default=[])
    parser.add_argument("--node", type=int, action="append", default=[])
    asked = parser.parse_args()
    sys.stdout.write("".join(f"{line}\n" for line in wanted(sys.stdin.read(), asked.tail, asked.rank, asked.node)))


def wanted(log: str, tail: int | None, ranks: list[int], nodes: list[int]) -> list[str]:
    """Return the lines of these nodes and ranks (empty: all), or only the last ``tail`` of them.

    A line belongs to a rank if it begins with ``[nodeN rankR]``.
    """
    lines = plain(log).splitlines()
    if ranks or nodes:
        any_rank = "|".join(map(str, ranks)) or "[0-9]+"
        any_node = "|".join(map(str, nodes)) or "[0-9]+"
        place = f" rank({any_rank})" if ranks else ".*"
        lines = [line for line in lines if re.match(rf"\[node({any_node}){place}\]", line)]
    return lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]


if __name__ == "__main__":
    main()
