"""The error of a failed rank, and how errors look in a cell.

Apart from ``session``, since every rank imports this package, and none needs what starts runs.
"""

import traceback as tracebacks
from pathlib import Path

from ddpctl.errors import DdpctlError
from ddpwire.exits import Exit


class RankError(DdpctlError):
    """A rank of the run failed: which, where, with its traceback. Its cause is the rank's exception, if it travels."""

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
        self.rank = rank  # whose failure was the first; None: nobody's, as when a node was killed
        self.cell = cell  # "Cell In[3]", or the file
        self.line = line  # in it
        self.code = code  # what the run exited with
        self.traceback = traceback.rstrip("\n")  # the rank's own, or the last lines of its log; empty: it left none

    def __str__(self) -> str:
        return f"{self.message}\n{self.traceback}" if self.traceback else self.message

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in the place of our own frames, which say nothing about the rank."""
        return [*self.traceback.splitlines(), f"{type(self).__name__}: {self.message}"]


def as_the_caller_sees(error: BaseException) -> BaseException:
    """The error without our own frames, which say nothing to whoever called ``launch``.

    Raised again, it has launch's frame again; IPython, which would show it, prints what ``_render_traceback_`` says.
    """
    if not hasattr(error, "_render_traceback_"):
        error.__dict__["_render_traceback_"] = lambda: _of_cells(error)
    return error.with_traceback(None)


def _of_cells(error: BaseException) -> list[str]:
    """Its traceback from the first cell on, up to our own package."""
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
