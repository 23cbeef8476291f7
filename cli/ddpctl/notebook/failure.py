"""How a rank's failure looks in a cell. Knows nothing of how it came here."""

from ddpctl.errors import DdpctlError
from ddpwire.exits import Exit


class RankError(DdpctlError):
    """A rank of the run failed: which, where, with its traceback. Its cause is the rank's exception, if it travels."""

    exit_code = Exit.SCRIPT

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
        text = traceback.rstrip("\n")
        super().__init__(f"{message}\n{text}" if text else message)
        self.message = message  # the one line without the traceback
        self.rank = rank  # whose failure was the first; None: nobody's, as when a node was killed
        self.cell = cell  # "Cell In[3]", or the file
        self.line = line  # in it
        self.code = code  # what the run exited with
        self.traceback = text  # the rank's own, or the last lines of its log; empty: it left none

    def _render_traceback_(self) -> list[str]:
        """What IPython prints in the place of our own frames, which say nothing about the rank."""
        return [*self.traceback.splitlines(), f"{type(self).__name__}: {self.message}"]
