"""What rank 0 says before and after the training: pure text."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from ddptrain.job import Job, fingerprint
from ddptrain.ledger import Ledger
from ddptrain.loop import Fitted
from ddpwire import names
from ddpwire.exits import Exit

_SIGNALS = {Exit.INTERRUPTED: "Ctrl-C", Exit.SAVED_USR1: "SIGUSR1", Exit.SAVED_TERM: "SIGTERM"}


def headline(job: Job) -> str:
    """What is going to be trained, on what, with what."""
    options, world = job.options, job.world
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    where = f"{world.backend} on {world.device.type}" if world.place.size > 1 else world.device.type
    text = (
        f"{options.model.name} ({parameters:,} parameters) on {job.data.name} "
        f"({len(job.train):,} images to train, {len(job.test):,} to test): "
        f"{_count(world.place.size, 'rank')}, {where}, {_count(torch.get_num_threads(), 'thread')} a rank, "
        f"batch {job.batch_size}, {_count(options.training.epochs, 'epoch')} of {_count(job.steps_per_epoch, 'step')}; "
        f"{job.precision.name}, {job.preparation.feed.told}"
    )
    if options.optimizer.scale_lr:
        size, lr = world.place.size, options.optimizer.lr
        text += f"\nlearning rate {lr:g} x {_count(size, 'rank')} = {lr * size:g} (--scale-lr)"
    return text


def resumed(job: Job, path: Path, step: int, epochs_before: int | None) -> str:
    """Where the training goes on; ``epochs_before``: how long it was to be, where that is known."""
    epochs = job.options.training.epochs
    if not epochs:
        return f"resumed from {path}: evaluating step {step} (--epochs 0)"
    if step >= job.num_steps:
        done = f"all {job.num_steps} steps are" if step == job.num_steps else f"step {step} of only {job.num_steps} is"
        return (
            f"resumed from {path}: {done} done, nothing is left to train "
            "(more --epochs go on, another --checkpoint-dir starts anew)"
        )
    epoch = step // job.steps_per_epoch + 1
    told = f"resumed from {path}: going on at step {step + 1} of {job.num_steps} (epoch {epoch})"
    if epochs_before not in (None, 0, epochs):
        told += f"; {_count(epochs, 'epoch')} now, {epochs_before} before: the learning rate follows the new length"
    return told


def stopped(job: Job, fitted: Fitted, checkpoint: Path | None, *, timed_out: bool, another: int | None = None) -> str:
    """That a stop was asked for, and how to go on; ``another``: the rank that was told, where it was not this one."""
    by = "--stop-after" if timed_out else _SIGNALS[Exit(fitted.exit_code)]
    if another is not None:
        by += f" to rank {another}"
    where = f"stopped by {by} after step {fitted.step} of {job.num_steps}"
    # A launcher that names the folder for each run says by itself how to go on.
    how = "" if names.CHECKPOINT_DIR in os.environ else "; the same command goes on from there"
    return f"{where}: saved {checkpoint}{how}"


def summary(job: Job, fitted: Fitted, *, right: int, checkpoint: Path | None) -> str:
    """How it ended."""
    speed = f"{fitted.images / fitted.seconds:.0f}" if fitted.seconds else "nothing was trained"
    return "\n".join(
        (
            f"world size     {job.world.place.size}",
            f"test accuracy  {100 * right / len(job.test):.2f} % ({right} of {len(job.test)} images)",
            f"images/s       {speed}",
            *([f"checkpoint     {checkpoint}"] if checkpoint else []),
            f"weights sha256 {fingerprint(job.model.state_dict())}",
        )
    )


def costs(job: Job, ledger: Ledger, phases: Mapping[str, float]) -> str:
    """What the time and the memory of this rank went for; the peak is torch's on a GPU, the process' elsewhere."""
    shares = {"start-up": ledger.lost_s["startup"], "restore": ledger.lost_s["restore"]}
    shares |= {"evaluation": ledger.lost_s["evaluation"], "checkpoints": ledger.lost_s["checkpoint"]}
    lost = [f"{name} {_percent(seconds, ledger.total_s)}" for name, seconds in shares.items() if seconds]
    lines = ["goodput        " + f"{_percent(ledger.productive_s, ledger.total_s)} of {ledger.total_s:.1f} s in steps"]
    if lost:
        lines[0] += "; " + ", ".join(lost)
    if steps_s := sum(phases.values()):
        groups = {"data": ("data", "h2d"), "compute": ("forward", "backward", "optimizer")}
        groups |= {"communication": ("comm_exposed",), "other": ("other",)}
        told = (f"{name} {_percent(sum(phases[one] for one in group), steps_s)}" for name, group in groups.items())
        lines.append("a step         " + ", ".join(told))
    cuda = job.world.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines.append(f"peak memory    {peak / 2**20:,.0f} MiB of the {'GPU' if cuda else 'process'}, rank 0")
    return "\n".join(lines)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
