"""Runs a function of a notebook, or a script, on the GPUs of this machine, and returns the result.

    from ddpctl.notebook import launch

    accuracy = launch(train, gpus=2, args=(0.1,))
    launch("train.py", gpus=2, args=["--lr", "0.1"])

Each call launches a run on the target local, as ``ddpctl launch`` does. Each rank is a new process, so the notebook's
kernel does not use CUDA. The modules of this package use IPython if it is installed. They never import torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpctl.errors import DdpctlError
from ddpctl.notebook.errors import RankError, as_the_caller_sees

__all__ = ["RankError", "launch"]


def launch(
    what: Callable[..., Any] | str,
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
    """Run ``what`` on ``gpus`` GPUs of this machine, show its progress, and wait for its end.

    If ``what`` is a function, every rank calls ``what(*args, **kwargs)``. ``launch`` returns the result of rank 0, with
    tensors on the CPU. If ``what`` is a script or "ddptrain", ``args`` is its command line. ``launch`` returns a
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
            what,
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
