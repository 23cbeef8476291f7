"""Shows a run in the cell until it has ended: its log as it grows, its curve, and what an interruption does.

The log is read from the node's file: what a process prints to its own stdout is not the cell's.
"""

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from ddpctl import launch as verbs
from ddpctl.desk import Desk
from ddpctl.notebook.progress import Progress, screen
from ddpctl.run import Run, RunStatus
from ddpwire import folder

POLL_S = 0.1
SAID = re.compile(r"\[node0\] rank [0-9]+ said: ")
# So often it is asked whether the run is alive, while its outcome is not written: more and more seldom, since it is the
# start of a Python each time, in sessions of 12 hours.
LOOK_S, LOOK_SELDOM_S = 2.0, 15.0


class Tail:
    """What is new at the end of a file, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, ""
        self._file: IO[str] | None = None

    def lines(self) -> list[str]:
        """The lines since the last call."""
        if self._file is None:
            with suppress(OSError):
                self._file = self._path.open(errors="replace")
        if self._file is None:
            return []
        *whole, self._part = (self._part + self._file.read()).split("\n")
        return whole

    def close(self) -> None:
        """Read no more."""
        if self._file is not None:
            self._file.close()


def follow(desk: Desk, run: Run) -> tuple[RunStatus, bool]:
    """Show it to its end; how it ended, and whether the cell was interrupted."""
    node = Path(run.folder) / folder.node_name(0)
    tail, stopper = Tail(node / folder.NODE_LOG), verbs.Stopper(desk, run)
    progress = Progress(node / folder.NODE, screen())
    looked, patience = time.monotonic(), LOOK_S
    state = None
    while state is None:
        try:
            _print(tail.lines())
            progress.update()
            if (node / folder.OUTCOME).exists() or time.monotonic() - looked > patience:
                looked, patience = time.monotonic(), min(2 * patience, LOOK_SELDOM_S)
                (found,) = verbs.status(desk, (run,))
                state = found if found.ended else None
            if state is None:
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            _stop(stopper)
    _print(tail.lines())
    tail.close()
    progress.close()
    return state, bool(stopper.times)


def _print(lines: list[str]) -> None:
    """All but a failed rank's last words, which its error shows as well."""
    for line in lines:
        if not SAID.match(line):
            print(line, flush=True)


def _stop(stopper: verbs.Stopper) -> None:
    """Hand on an interruption, and those that come while it is seen to."""
    while True:
        try:
            return stopper()
        except KeyboardInterrupt:
            continue
