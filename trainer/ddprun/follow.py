"""The logs of a run's nodes or ranks, as far as they are written or until the run ends: whole lines, none lost."""

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ddprun import presence
from ddprun.logs import without_torchs_prefix
from ddpwire.folder import NODE_LOG, OUTCOME
from ddpwire.regular import open_regular

APPEAR_S = 10.0  # how long to wait for the first file
SILENT_S = 2.0  # a node of which nothing is alive for so long, without an outcome, was killed
POLL_S = 0.1
NODE_DIR = re.compile(r"node-(\d+)")
RANK_LOG = re.compile(r"rank-(\d+)\.log")


class Tail:
    """One growing file, read line by line."""

    def __init__(self, path: Path, place: tuple[int, int] | None, tail: int | None) -> None:
        self._place = place
        self._file = open_regular(path)
        self._rest = b""
        self._skip_to_last = tail

    def lines(self, *, last: bool = False) -> Iterator[bytes]:
        """The lines that were added, without a torn one unless this is the ``last`` look."""
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        if last and self._rest:
            whole, self._rest = [*whole, self._rest], b""
        if self._skip_to_last is not None:
            whole = whole[max(0, len(whole) - self._skip_to_last) :]
            self._skip_to_last = None
        for line in whole:
            if self._place:
                node, rank = self._place
                line = f"[node{node} rank{rank}] ".encode() + without_torchs_prefix(line, rank)
            yield line + b"\n"

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def node_dirs(run_dir: Path, nodes: tuple[int, ...]) -> list[tuple[int, Path]]:
    """The folders of ``nodes`` (empty: of all) that are there, in the order of their numbers."""
    found = [(int(match[1]), path) for path in run_dir.glob("node-*") if (match := NODE_DIR.fullmatch(path.name))]
    return sorted((node, path) for node, path in found if not nodes or node in nodes)


def sources(run_dir: Path, nodes: tuple[int, ...], ranks: tuple[int, ...]) -> dict[Path, tuple[int, int] | None]:
    """The logs that are there, and of which node's which rank; None: ddprun has put that before the lines."""
    found: dict[Path, tuple[int, int] | None] = {}
    for node, folder in node_dirs(run_dir, nodes):
        if not ranks and (folder / NODE_LOG).is_file():
            found[folder / NODE_LOG] = None
        for path in sorted(folder.glob("rank-*.log")):
            match = RANK_LOG.fullmatch(path.name)
            if match and int(match[1]) in ranks and path.is_file():
                found[path] = (node, int(match[1]))
    return found


def print_logs(
    run_dir: Path, nodes: tuple[int, ...], ranks: tuple[int, ...], *, tail: int | None, follow: bool
) -> bool:
    """Print the logs to stdout, and follow them until every node has ended. False: there was none."""
    tails: dict[Path, Tail] = {}
    asker = os.getppid()
    started = time.monotonic()
    ended = Ended(run_dir, nodes)
    while True:
        # Whoever asked may be gone: then nobody reads this.
        last = not follow or os.getppid() != asker or (ended() if tails else time.monotonic() - started > APPEAR_S)
        for path, place in sources(run_dir, nodes, ranks).items():
            if path not in tails:
                tails[path] = Tail(path, place, tail)
        for source in tails.values():
            sys.stdout.buffer.writelines(source.lines(last=last))
        sys.stdout.buffer.flush()
        if last:
            for source in tails.values():
                source.close()
            return bool(tails)
        time.sleep(POLL_S)


class Ended:
    """Asked again and again, whether every node's ddprun has ended."""

    def __init__(self, run_dir: Path, nodes: tuple[int, ...]) -> None:
        self._run_dir, self._nodes = run_dir, nodes
        self._alive_at = time.monotonic()

    def __call__(self) -> bool:
        """Yes, when no lock is held and every outcome is there, or no lock has been held for a while."""
        folders = [folder for _, folder in node_dirs(self._run_dir, self._nodes)]
        if any(map(presence.is_alive, folders)):
            self._alive_at = time.monotonic()
            return False
        return all((f / OUTCOME).exists() for f in folders) or time.monotonic() - self._alive_at > SILENT_S
