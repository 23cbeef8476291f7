"""The error of a failed rank, and how errors are shown in a cell.

This module is separate from ``session`` because every rank imports this package, and no rank needs the code that starts
runs.
"""

import traceback as tracebacks
from pathlib import Path

from ddpctl.errors import DdpctlError
from ddpwire.exits import Exit


class RankError(DdpctlError):
    """A run failed: which rank, where, and its traceback. ``__cause__`` is the rank's exception if it can be sent."""

    code: int = Exit.SCRIPT

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        cell: str | None = None,
        line: int | None = None,
        code: int = Exit.SCRIPT,
        traceback: str = "",
    ) -> None:
        super().__init__(message)  # the one line without the traceback
        self.rank = rank  # the one that failed first; None if none did, as when a node was killed
        self.cell = cell  # "Cell In[3]", or the file
        self.line = line  # in ``cell``
        self.code = code  # what the run exited with
        self.traceback = traceback.rstrip("\n")  # the rank's own, or the last lines of its log, or empty

    def __str__(self) -> str:
        return f"{self.message}\n{self.traceback}" if self.traceback else self.message

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints instead of our own frames, which show nothing about the rank."""
        return [*self.traceback.splitlines(), f"{type(self).__name__}: {self.message}"]


def as_the_caller_sees(error: BaseException) -> BaseException:
    """Return the error without our own frames, which do not help the caller of ``launch``.

    When it is raised again, launch's frame is added. IPython would show that frame, so it calls ``_render_traceback_``.
    """
    if not hasattr(error, "_render_traceback_"):
        error.__dict__["_render_traceback_"] = lambda: _of_cells(error)
    return error.with_traceback(None)


def _of_cells(error: BaseException) -> list[str]:
    """Return the traceback from the first frame of a cell on, without the frames of our own package."""
    from ddpctl.notebook.serialization import cell_of

    package = str(Path(__file__).parent)
    frames = [frame for frame in tracebacks.extract_tb(error.__traceback__) if not frame.filename.startswith(package)]
    first = next((index for index, frame in enumerate(frames) if cell_of(frame.filename) != frame.filename), 0)
    shown = [
        tracebacks.FrameSummary(cell_of(frame.filename), frame.lineno, frame.name, line=frame.line)
        for frame in frames[first:]
    ]
    text = f"Traceback (most recent call last):\n{''.join(tracebacks.format_list(shown))}"
    return [*text.splitlines(), f"{type(error).__name__}: {error}".removesuffix(": ")]
