"""Runs a function from a notebook's cell, or a script, on GPUs of this machine, and returns its result.

    from ddpctl.notebook import launch

    accuracy = launch(train, gpus=2, args=(0.1,))
    launch("train.py", gpus=2, args=["--lr", "0.1"])

Like ``ddpctl launch``, it launches on the target local, and each rank is a separate process. So it uses no CUDA in the
notebook's kernel, and each call starts new processes. The modules of this package use IPython if it is installed, and
never import torch.
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
    """Run ``what`` on one rank for each of ``gpus`` GPUs of this machine, show its progress, and wait for its end.

    A function is called as ``what(*args, **kwargs)`` on every rank. The value that it returns on rank 0 is returned,
    with tensors on the CPU. A script, or "ddptrain", gets ``args`` as its command line; then a ``Finished`` is
    returned, which has the folder of the checkpoints. Without GPUs, the ranks are CPU processes. ``ranks`` is the
    number of ranks if it is not one per GPU; it must divide ``gpus``.

    ``resume`` is the name of an earlier run, from whose checkpoints the new run continues. True means the newest run of
    the same function in the same notebook or file, or of the same script; on Kaggle, also a run in the output of an
    earlier version that is among this notebook's inputs. The other arguments mean the same as in ddpctl.yaml.

    Raises RankError if a rank fails; its ``traceback`` and its str contain the rank's traceback as text. Raises
    ConfigError if the call cannot be sent to the ranks or this machine cannot run it, and UsageError for wrong
    arguments. Raises KeyboardInterrupt if the cell was interrupted, after the run has ended.
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
