"""The client for a user's own training loop: report progress to ddprun, and ask whether to stop (docs/script.md).

    import ddpwire.script as ddp            # above `import torch`: from here on no signal is lost

        ddp.progress(step, total=num_steps, samples=len(batch))
        if ddp.should_stop():               # the same answer on every rank
            if rank == 0:
                path = save(model, ddp.checkpoint_dir() / "last.pt")
                ddp.saved(path)
            ddp.stop()                      # exit code 143 for SIGTERM, 138 and 140 for SIGUSR1 and 2, 130 for Ctrl-C

The same lines work under ddprun, under torchrun and in a single process. A report has no effect if nothing reads it.
torch is used only if the ranks have met through torch.distributed. prometheus_client is used only if ddprun collects
metrics.
"""

import atexit
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddprank import resume
from ddprank.heartbeat import HEARTBEAT_FILE, Heart
from ddprank.signals import Signals
from ddpwire import names
from ddpwire.events import EVENTS_FILE, events_of

if TYPE_CHECKING:
    from ddprank.series import LoopSeries, Scalar
    from ddprank.vote import Vote

__all__ = ["checkpoint_dir", "exit_code", "heartbeat", "progress", "saved", "should_stop", "stop"]


def progress(
    step: int,
    *,
    total: int | None = None,
    samples: int = 0,
    loss: "float | Scalar | None" = None,
    lr: float | None = None,
    epoch: int | None = None,
) -> None:
    """Report that this rank has finished optimizer step ``step`` (counted from 1), on ``samples`` samples of its own.

    ``total`` is the number of the last step. If ``loss`` is a tensor, reading it waits for the device, so pass it
    only in some of the steps.
    """
    if step == 1 and not _last_step and os.environ.get(names.RANK) == "0":
        _report_start_over()
    if not _last_step:
        resume.begin(step)
    heartbeat(step)
    if step == total:
        _heart.complete()
    if _series is not None:
        _series.step(step, total=total, samples=samples, loss=loss, lr=lr, epoch=epoch)


def saved(path: str | Path, *, step: int | None = None) -> None:
    """Report that the checkpoint of ``step`` (default: the last step) is completely on the disk.

    Call this on the rank that wrote the checkpoint. If ``path`` does not exist, this function only prints a warning
    on stderr.
    """
    step = _last_step if step is None else step
    try:
        size_bytes = os.stat(path).st_size  # noqa: PTH116 - the path may be a str
    except OSError as error:
        print(f"ddpwire: {path} is not a checkpoint: {error.strerror}", file=sys.stderr)
        return
    if _series is not None:
        _series.saved(step, size_bytes)
    if os.environ.get(EVENTS_FILE):
        events_of(os.environ).emit("checkpoint_saved", step=step, bytes=size_bytes, path=str(Path(path).absolute()))


def heartbeat(step: int | None = None) -> None:
    """Report that this rank is alive. Call this during work without steps, such as an evaluation or a save."""
    global _last_step
    if step is not None:
        _last_step = step
    _heart.beat(_last_step)


def should_stop() -> bool:
    """Return whether to save and stop now. Every rank must call this after every step. All ranks get the same answer.

    Before the first call, a signal ends the process at once, because there is nothing to save.
    """
    global _code
    _signals.can_save = True
    if not _code and (_code := _agreed(_signals.code)) and _vote is not None:
        _heart.stopped_for(_vote.asker)
    return _code != 0


def exit_code() -> int:
    """Return the exit code of ``stop``. Before ``should_stop`` returns True, return 0."""
    return _code


def stop() -> NoReturn:
    """Wait until every rank has called this, then exit with the code of the signal that requested the stop."""
    global _leaving
    if _vote is not None:
        _vote.meet()
    _leaving = True
    sys.exit(_code)


def checkpoint_dir(default: str | Path = "checkpoints") -> Path:
    """Create and return the folder for checkpoints.

    This is the launcher's folder, which all attempts share. If the launcher has set no folder, it is ``default``.
    """
    folder = Path(os.environ.get(names.CHECKPOINT_DIR) or default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _report_start_over() -> None:
    """If an earlier attempt took steps, report that this attempt starts again at the first step."""
    before = os.environ.get(names.STEPS_BEFORE, "")
    if before.isdecimal() and int(before):
        text = f"the script starts again at step 1 without a checkpoint; an earlier attempt had reached step {before}"
        print(f"ddpwire: {text}", file=sys.stderr)
        events_of(os.environ).emit("started_over", steps=int(before))


def _agreed(code: int) -> int:
    """Return the code that the ranks agree on, or this process's own code if there are no other ranks."""
    global _vote, _world
    dist = sys.modules.get("torch.distributed")
    world = dist.group.WORLD if dist is not None and dist.is_available() and dist.is_initialized() else None
    if world is not _world:  # the ranks have met for the first time, or again
        _world, _vote = world, None
        if dist is not None and world is not None and dist.get_world_size() > 1:
            from ddprank.vote import Vote

            _vote = Vote(dist.new_group(backend="gloo"))  # a group of its own: no GPU waits for it
            lowest, highest = _vote.steps(_last_step)
            if lowest < highest and dist.get_rank() == 0:
                print(
                    f"ddpwire: the ranks start with different steps, {lowest} to {highest}: have they loaded different "
                    "checkpoints? Load on rank 0 and broadcast (docs/script.md)",
                    file=sys.stderr,
                )
    return code if _vote is None else _vote.ask(code)


def _leave() -> None:
    """Abandon the vote. Of all exit functions, this one runs last, because a script imports this module first."""
    if _vote is not None:
        _vote.part()
    if _leaving:
        with contextlib.suppress(OSError, ValueError):  # nothing reads the streams any more
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_code)  # gloo's threads can abort the process while the interpreter shuts down


_signals = Signals()
_heart = Heart(None)
_series: "LoopSeries | None" = None
_vote: "Vote | None" = None
_world: Any = None  # torch's group of all ranks, for which _vote was made
_last_step = 0
_code = 0
_leaving = False
atexit.register(_leave)
try:
    _heart = Heart(os.environ.get(HEARTBEAT_FILE))
except OSError as error:
    print(f"ddpwire: cannot send heartbeats to ddprun: {error}", file=sys.stderr)
if os.environ.get(names.PROMETHEUS_MULTIPROC_DIR):
    try:
        from ddprank.series import LoopSeries

        _series = LoopSeries()
    except (ImportError, OSError) as error:
        print(f"ddpwire: training without metrics: {error}", file=sys.stderr)
if threading.current_thread() is threading.main_thread():  # no other thread may set signal handlers
    _signals.install()
