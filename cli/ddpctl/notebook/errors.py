"""The error of a failed rank, and the display of errors in a notebook.

Every rank imports this package, so this module does not import ``session``, which has the code that starts runs.
"""

import traceback as tracebacks
from pathlib import Path

from ddpctl.errors import DdpctlError
from ddpwire.exits import Exit


class RankError(DdpctlError):
    """A run failed. ``__cause__`` is the exception of the failed rank if that exception can be pickled."""

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
        super().__init__(message)  # one line, without the traceback
        self.rank = rank  # the rank that failed first, or None if no rank failed, for example if a node was killed
        self.cell = cell  # such as "Cell In[3]", or the name of a file
        self.line = line  # the line number in ``cell``
        self.code = code  # the exit code of the run
        self.traceback = traceback.rstrip("\n")  # the traceback of the rank, or the last lines of its log, or empty

    def __str__(self) -> str:
        return f"{self.message}\n{self.traceback}" if self.traceback else self.message

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints instead of a traceback of this process."""
        return [*self.traceback.splitlines(), f"{type(self).__name__}: {self.message}"]


def as_the_caller_sees(error: BaseException) -> BaseException:
    """Return the error without the frames of this package, which do not help the caller of ``launch``.

    Python adds the frame of ``launch`` when the error is raised again. IPython does not show that frame, because it
    prints the result of ``_render_traceback_``.
    """
    if not hasattr(error, "_render_traceback_"):
        error.__dict__["_render_traceback_"] = lambda: _of_cells(error)
    return error.with_traceback(None)


def _of_cells(error: BaseException) -> list[str]:
    """Return the part of the traceback that begins at the first frame in a cell, without the frames of this package."""
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
