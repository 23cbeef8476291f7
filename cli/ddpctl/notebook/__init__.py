"""Runs a function of a notebook's cell, or a script, on all GPUs of this machine, and gives its result back.

    from ddpctl.notebook import launch

    def train(lr):
        ...                       # torchrun's variables are set; every rank runs this
        return accuracy           # rank 0's is what launch returns

    accuracy = launch(train, gpus=2, args=(0.1,))
    launch("train.py", gpus=2, args=["--lr", "0.1"])

It launches on the target local as ``ddpctl launch`` does; the ranks are processes of their own. So nothing of CUDA is
touched in the notebook's kernel, and a second call begins again. The modules of this package use IPython where it is
installed, and never import torch.
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
    time_limit: str | None = None,
    grace: float = 30.0,
) -> Any:
    """Run ``what`` on a rank for each of ``gpus`` GPUs of this machine, show it here, and wait for its end.

    A function is called as ``what(*args, **kwargs)`` on every rank; what rank 0 returns is returned, its tensors on the
    CPU. A script, or "ddptrain", gets ``args`` as its command line; a ``Finished`` is returned, which says where its
    checkpoints are. Without GPUs the ranks are CPU processes. ``ranks``: fewer than one a GPU, a divisor of ``gpus``.

    ``resume``: the name of an earlier run whose checkpoints it continues from; True: the newest of the same function in
    the same notebook or file, or of the same script; on Kaggle also one of a former version's output among this
    notebook's inputs. The other arguments are those of ddpctl.yaml.

    Raises RankError when a rank fails, with its traceback as text in ``traceback`` and in its str; ConfigError for what
    cannot travel or cannot be; and KeyboardInterrupt when the cell was interrupted, once nothing of the run is left.
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
            time_limit=time_limit,
            grace=grace,
        )
    except (DdpctlError, KeyboardInterrupt) as error:
        raise as_the_caller_sees(error) from error.__cause__
