"""A rank of ddptrain that sends itself a signal at chosen moments.

    exact_rank.py FOLDER SIGNAL@MOMENT:NUMBER@RANK ... -- OPTIONS OF ddptrain

    step:N        in step N, between the all-reduce of the gradients and the update of the weights
    saved:N       in step N, as above, after waiting until a checkpoint is complete
    evaluation:N  in the N-th evaluation of a process
    data:N        when rank 0 has written the data of the checkpoint of step N, but not its manifest
    manifest:N    when that manifest has its final name, but the data does not have its final name yet

A file in FOLDER records each signal, so that a restarted training does not get it again.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ddptrain import __main__, checkpoint, train_loop

SAVED_S = 120.0


def patch(
    owner: object, name: str, *, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
):
    """Replace a function with one that also calls ``before`` and ``after``, with the same arguments."""
    function = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = function(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, replacement)


def wait_for_checkpoint(moment: str) -> None:
    """Wait until a checkpoint is complete, if ``moment`` requires one."""
    folder, deadline = Path(os.environ["DDP_CHECKPOINT_DIR"]), time.monotonic() + SAVED_S
    while moment.startswith("saved:") and not any(
        checkpoint.manifest_path(path).exists() for path in folder.glob("step-*.pt")
    ):
        if time.monotonic() > deadline:
            sys.exit(f"exact_rank.py: no checkpoint in {folder} after {SAVED_S:g} s")
        time.sleep(0.01)


def main() -> None:
    separator = sys.argv.index("--")
    folder, events = Path(sys.argv[1]), [event.split("@") for event in sys.argv[2:separator]]
    folder.mkdir(parents=True, exist_ok=True)
    evaluations = count(1)

    def reach(moment: str) -> None:
        for name, at, rank in events:
            if (at.replace("saved:", "step:"), rank) == (moment, os.environ.get("RANK", "0")):
                wait_for_checkpoint(at)
                try:
                    (folder / f"{name}@{at}").touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.Signals[f"SIG{name}"])

    def save(value: Any, *_: object, **__: object) -> None:
        if isinstance(value, dict) and "shaping" in value:  # torch.save is called for single tensors as well
            reach(f"data:{value['step']}")

    def sync(path: Path) -> None:
        for part in path.glob(".step-*.pt.part"):
            number = int(part.name[len(".step-") : -len(".pt.part")])
            if checkpoint.manifest_path(path / f"step-{number:08d}.pt").exists():
                reach(f"manifest:{number}")

    patch(train_loop, "optimizer_step", before=lambda *_, step, **__: reach(f"step:{step}"))
    patch(train_loop, "_broadcast_buffers", after=lambda *_: reach(f"evaluation:{next(evaluations)}"))
    patch(torch, "save", after=save)
    patch(checkpoint, "sync_folder", before=sync)
    sys.argv[1:] = sys.argv[separator + 1 :]
    __main__.main()


if __name__ == "__main__":
    main()
