"""Runs a function of a notebook, or a script, on the GPUs of this machine, and returns the result.

    from ddpctl.notebook import launch

    accuracy = launch(train, gpus=2, args=(0.1,))
    launch("train.py", gpus=2, args=["--lr", "0.1"])

Each call launches a run on the target local, as ``ddpctl launch`` does. Each rank is a new process, so the notebook's
kernel does not use CUDA. The modules of this package use IPython if it is installed. They never import torch. Every
rank imports this module, so it does not import ``session``, which has the code that starts runs.
"""

import traceback as tracebacks
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddpctl.errors import DdpctlError
from ddpwire.exits import Exit

__all__ = ["RankError", "launch"]


def launch(
    callee: Callable[..., Any] | str,
    *,
    gpus: int = 2,
    ranks: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    resume: str | bool = False,
    max_restarts: int | None = None,
    hang_timeout: float | None = None,
    time_limit: str | None = None,
    grace: float = 30.0,
) -> Any:
    """Run ``callee`` on ``gpus`` GPUs of this machine, show its progress, and wait for its end.

    If ``callee`` is a function, every rank calls ``callee(*args, **kwargs)``. ``launch`` returns the result of rank 0,
    with tensors on the CPU. If ``callee`` is a script or "ddptrain", ``args`` is its command line. ``launch`` returns a
    ``Finished``, which has the folder of the checkpoints. Without GPUs, the ranks are CPU processes. There is one rank
    for each GPU, unless ``ranks`` is given. ``gpus`` must be a multiple of ``ranks``.

    ``resume`` is the name of an earlier run. The new run continues from the checkpoints of that run. True means the
    newest run of the same script, or of the same function in the same notebook or file. On Kaggle, the newest run can
    also be from an earlier version of the notebook, if the output of that version is an input of the notebook.
    The other arguments mean the same as in ddpctl.yaml.

    Raises RankError if a rank fails. Its ``traceback`` is the traceback of the rank. Raises ConfigError if the call
    cannot be sent to the ranks or this machine cannot run it, and UsageError if an argument is wrong. If the cell is
    interrupted, ``launch`` stops the run, waits for its end and raises KeyboardInterrupt.
    """
    from ddpctl.notebook.session import run

    try:
        return run(
            callee,
            args=tuple(args),
            kwargs=dict(kwargs or {}),
            name=name,
            resume=resume,
            gpus=gpus,
            ranks=ranks,
            device=device,
            env=dict(env or {}),
            max_restarts=max_restarts,
            hang_timeout=hang_timeout,
            time_limit=time_limit,
            grace=grace,
        )
    except (DdpctlError, KeyboardInterrupt) as error:
        raise as_the_caller_sees(error) from error.__cause__


class RankError(DdpctlError):
    """A run failed. ``__cause__`` is the exception of the failed rank if that exception can be pickled."""

    code: int = Exit.SCRIPT  # the exit code of the run
    rank: int | None = None  # the rank that failed first, or None if no rank failed, for example if a node was killed
    cell: str | None = None  # such as "Cell In[3]", or the name of a file
    line: int | None = None  # the line number in ``cell``
    traceback: str = ""  # the traceback of the rank, or the last lines of its log, or empty

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message)  # one line, without the traceback
        vars(self).update(attributes)
        self.traceback = self.traceback.rstrip("\n")

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
