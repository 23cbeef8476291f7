"""Runs one rank from its options to its exit code: process group, data, state, checkpoint, loop, report."""

import contextlib
import gc
import os
import resource
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddprank.heartbeat import HEARTBEAT_FILE, Heart
from ddprank.signals import Signals
from ddptrain import compat
from ddptrain.callbacks import Callbacks, NonFinite, NonFiniteGuard, StopVote, open_progress
from ddptrain.checkpoint_directory import CheckpointDirectory, check_shared
from ddptrain.checkpoint_manager import CheckpointManager
from ddptrain.config import Options
from ddptrain.data.base import ImageDataset
from ddptrain.data.datasets import SOURCES
from ddptrain.data.kaggle import locate
from ddptrain.data.text import TextDataset
from ddptrain.distributed import (
    RankInfo,
    agree,
    check_strategy,
    find_ddp,
    gather,
    is_lost_peer,
    is_sharded,
    is_timeout,
    join_ranks,
    make_world,
    nccl_failure,
    read_rank_info,
    set_up_torch,
)
from ddptrain.errors import TrainError, log_error
from ddptrain.goodput import Goodput, earlier_s, lost_before, steps_before
from ddptrain.memory_estimate import warn_if_too_large
from ddptrain.metrics import Metrics, open_metrics
from ddptrain.models import fetch_pretrained
from ddptrain.step_timing import Tracer, measure_phases
from ddptrain.straggler import StragglerDetector, StragglerEvent, gather_rank_hosts, straggler_message
from ddptrain.train_loop import Evaluation, TrainResult, diagnose_nonfinite, evaluate, train
from ddptrain.training_state import (
    TrainingState,
    build_training_state,
    fingerprint,
    global_batch_size,
    same_precision,
    step_flops,
)
from ddpwire import metrics as catalogue
from ddpwire import names
from ddpwire.events import EventLog, events_of
from ddpwire.exits import Exit
from ddpwire.run_files import write_error

RECORDS = 2000  # collectives that the flight recorder keeps, with --debug
_DATA_ERRORS = {Exit.DATA: "corrupt", Exit.NO_INPUT: "missing"}


def run(options: Options, environ: Mapping[str, str], signals: Signals, *, started: float | None = None) -> int:
    """Train, and return the exit code. ``started``: the value of time.monotonic() when the process was started."""
    rank_info, metrics = RankInfo(), Metrics()
    started = time.monotonic() if started is None else started
    lost = lost_before(environ, started=started)
    goodput = Goodput(started, steps_before=steps_before(environ), earlier_s=earlier_s(environ, lost))
    try:
        rank_info = read_rank_info(environ, options.ranks)
        metrics = open_metrics(environ, first=rank_info.is_first)
        for cause, seconds in lost.items():
            metrics.count(catalogue.UNPRODUCTIVE, cause, number=seconds)
        with contextlib.ExitStack() as resources:
            return _train(options, rank_info, environ, signals, goodput, metrics, resources)
    except TrainError as error:
        write_error(f"ddptrain: {error}", environ)
        if error.rank in (None, rank_info.rank):
            log_error(str(error))
        return error.code
    except Exception as error:
        if options.callbacks.debug and rank_info.size > 1:
            _dump_collectives(rank_info.rank)
        if is_lost_peer(error):
            if is_timeout(error):
                metrics.count(catalogue.COLLECTIVE_TIMEOUTS)
            code, line = signals.code or Exit.ABSENT, f"lost the other ranks: {str(error).splitlines()[0]}"
        else:
            traceback.print_exc()
            if isinstance(error, torch.OutOfMemoryError):
                metrics.memory()  # creates the series
                metrics.count(catalogue.DEVICE_OOMS)
                # The first sentences of torch's error state the requested memory.
                size = ". ".join(str(error).partition("\n")[0].split(". ")[:3]).rstrip(".")
                advice = "use a smaller --batch-size, or --accumulate or --recompute"
                code, line = Exit.CONFIG, f"has too little GPU memory: {size}: {advice}"
            elif (reason := nccl_failure(error)) is not None:
                code, line = Exit.SOFTWARE, f"cannot exchange gradients with NCCL: {reason}; NCCL_DEBUG=INFO shows more"
            else:
                write_error(f"ddptrain: rank {rank_info.rank}: {type(error).__name__}: {error}", environ)
                return Exit.SOFTWARE
        write_error(f"ddptrain: rank {rank_info.rank} {line}", environ)
        log_error(f"rank {rank_info.rank} {line}")
        return code


def _train(
    options: Options,
    rank_info: RankInfo,
    environ: Mapping[str, str],
    signals: Signals,
    goodput: Goodput,
    metrics: Metrics,
    resources: contextlib.ExitStack,
) -> int:
    batch_size = global_batch_size(options.training, rank_info)
    check_strategy(options, rank_info)
    set_up_torch(rank_info, environ, deterministic=options.machine.deterministic)
    if options.callbacks.debug:
        _turn_on_debugging()
    join_ranks(rank_info, options.ranks)
    world = make_world(rank_info, options.machine.device, options.ranks)
    directory = _open_directory(options, rank_info)
    if directory is not None:
        resources.callback(directory.unlock)
    options = replace(options, machine=same_precision(options.machine, world))
    options = replace(options, data=agree(rank_info, partial(locate, options.data, environ)))
    data = _load_data(options, rank_info, metrics)
    warn_if_too_large(options, world, getattr(data, "shape", None), batch_size)
    state = agree(rank_info, lambda: build_training_state(options, world, data, batch_size=batch_size))
    progress = open_progress(first=rank_info.is_first, environ=environ)
    progress.log(start_message(state))

    # A sharded optimizer cannot skip a step by a flag on the GPU, so each step waits for the norm of its gradient.
    guard = NonFiniteGuard(world.device if state.sharding is None else torch.device("cpu"))
    heartbeat = _open_heartbeat(environ)
    events = events_of(environ) if rank_info.is_first else EventLog(None, node=0)
    rank_hosts = gather_rank_hosts(rank_info, environ)
    manager = CheckpointManager(state, directory, metrics, goodput, events, on_wait=heartbeat.beat)
    if metrics.enabled:
        metrics.training_info(
            backend=world.backend if rank_info.size > 1 else "none",
            device=world.device.type,
            model=options.model.name,
            dataset=data.name,
            num_steps=state.num_steps,
            flops_per_sample=step_flops(state),
        )

    def log_straggler(event: StragglerEvent, step: int) -> None:
        progress.log(straggler_message(event, rank_hosts[event.rank], step, state.balance.percent(event.rank)))
        kind = "straggler" if event.ratio else "straggler_gone"
        events.emit(kind, step=step, rank=event.rank, node=rank_hosts[event.rank].node, ratio=round(event.ratio, 2))

    resumed = manager.resume()
    if resumed:
        progress.log(resume_message(state, *resumed))
    elif before := steps_before(environ):
        progress.log(f"there is no checkpoint: the training starts again at step 0, after it had reached step {before}")
        events.emit("started_over", steps=before)
    stop = StopVote(rank_info, signals, guard, after_s=60 * options.callbacks.stop_after, started=goodput.started)
    callbacks = Callbacks(
        poll_stop=stop.poll,
        heartbeat=heartbeat,
        metrics=metrics,
        goodput=goodput,
        phases=measure_phases(
            world.device, state.model.parameters(), alone=rank_info.size == 1, sharded=state.sharding is not None
        ),
        guard=guard,
        stragglers=StragglerDetector(rank_info.rank, rank_info.size, on_event=log_straggler),
        tracer=Tracer(
            options.callbacks.profile, options.callbacks.profile_dir / f"rank-{rank_info.rank}.json", log=log_error
        ),
        progress=progress,
        ddp=find_ddp(state.ddp),
        events=events,
        on_gpu=world.device.type == "cuda",
    )
    signals.can_save = True  # from here on a signal stops the training at the end of a step, after saving
    agree(rank_info, callbacks.on_train_begin)
    try:
        result = train(
            state, first_step=resumed[1] if resumed else 0, callbacks=callbacks, due=manager.is_due, save=manager.save
        )
    except NonFinite as error:
        raise diagnose_nonfinite(state, error.step, metrics) from None
    finally:
        callbacks.on_train_end()
        manager.wait_for_write()
    stop.close()
    if result.exit_code and stop.requested_by is not None:
        heartbeat.stopped_for(stop.requested_by)
    callbacks.stragglers.read_answer(result.step)
    _save_and_report(state, result, manager, callbacks, stop)
    uploader = manager.uploader
    if rank_info.size > 1:
        del state, manager  # they reference DDP and so gloo, which may abort the process when it exits
        gc.collect()
        dist.barrier()
    failed = uploader.wait(lambda: bool(result.exit_code or signals.code)) if uploader else Exit.OK
    return result.exit_code or (failed and signals.code) or failed  # after a stop, a resumed run uploads it


def _open_directory(options: Options, rank_info: RankInfo) -> CheckpointDirectory | None:
    """Return the locked checkpoint directory on rank 0, and None on all other ranks. Raises TrainError on all ranks."""
    folder = options.checkpoints.folder
    directory = agree(rank_info, lambda: CheckpointDirectory(folder) if rank_info.is_first else None)
    if is_sharded(options.ranks, rank_info):
        check_shared(folder, rank_info)
    return directory


def _open_heartbeat(environ: Mapping[str, str]) -> Heart:
    try:
        return Heart(environ.get(HEARTBEAT_FILE))
    except OSError as error:
        log_error(f"training without a heartbeat for ddprun: {error}")
        return Heart(None)


def _load_data(options: Options, rank_info: RankInfo, metrics: Metrics) -> ImageDataset | TextDataset:
    """Download the data set and the pretrained weights if they are missing, and load the data set. Raises TrainError.

    Rank 0 downloads first, which is enough if the nodes share a folder. Then one rank of each other node downloads.
    """
    source = SOURCES[options.data.name]
    fetches = [partial(source.prepare, options.data)] if source.prepare else []
    if options.model.pretrained:
        fetches.append(partial(fetch_pretrained, options.model))
    turn = 0 if rank_info.is_first else 1 if rank_info.local_rank == 0 else None
    try:
        for fetch in fetches:
            for now in (0, 1):
                agree(rank_info, fetch if turn == now else lambda: None)
        return agree(rank_info, partial(source.load, options.data, options.training.seed))
    except TrainError as error:
        if error.rank in (None, rank_info.rank) and error.code in _DATA_ERRORS:
            metrics.count(catalogue.DATA_ERRORS, _DATA_ERRORS[error.code])
        raise


def _save_and_report(
    state: TrainingState, result: TrainResult, manager: CheckpointManager, callbacks: Callbacks, stop: StopVote
) -> None:
    """Save the last step, and report how the training ended. Raises TrainError if the step cannot be saved."""
    evaluation = result.evaluation
    path = manager.save_last(result.step, None if evaluation is None else evaluation.accuracy)
    if result.exit_code:
        callbacks.progress.log(stop_message(state, result.step, path, by=stop.cause(result.exit_code)))
    else:
        callbacks.heartbeat.complete()
        if evaluation is None:
            with callbacks.goodput.time_lost("evaluation"):
                evaluation = evaluate(state)
        callbacks.flush_metrics()
        spent_s = gather(state.world.rank_info, callbacks.goodput.totals_s)
        callbacks.progress.log(cost_message(state, spent_s, callbacks.phases.totals))
        callbacks.progress.log(summary_message(state, result, evaluation=evaluation, checkpoint=path))
    callbacks.flush_metrics()
    lost = {cause: round(seconds, 3) for cause, seconds in callbacks.goodput.lost_s.items() if seconds}
    callbacks.events.emit(
        "training_ended",
        step=result.step,
        seconds=callbacks.goodput.total_s,
        productive_s=round(callbacks.goodput.productive_s, 3),
        lost_s=lost,
    )


def _turn_on_debugging() -> None:
    """Turn on torch's tools that show why ranks disagree, hang or compute NaN. They slow the training down.

    Call this before the process group is created. The user's environment takes precedence.
    """
    given = {
        # Not DETAIL: with it DistributedDataParallel over a gloo group ends in SIGSEGV (torch 2.15, without ddptrain).
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_FR_BUFFER_SIZE": str(RECORDS),
        "TORCH_FR_DUMP_TEMP_FILE": "flight-recorder-",  # NCCL adds the rank
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "NCCL_DEBUG": "WARN",
    }
    for name, value in given.items():
        os.environ.setdefault(name, value)
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # torch may have been imported long before
    torch.autograd.set_detect_anomaly(True, check_nan=False)  # only tracebacks: NonFiniteGuard finds NaN


def _dump_collectives(rank: int) -> None:
    """Write the last collectives of this rank to a file. Only gloo needs this. NCCL writes such files itself."""
    dump = compat.flight_recorder_dump()
    if dump is None:
        return
    path = Path(f"flight-recorder-{rank}.json")
    try:
        trace = dump()
        path.write_bytes(trace if isinstance(trace, bytes) else trace.encode())
    except (OSError, RuntimeError) as error:
        log_error(f"cannot write the last collectives of rank {rank}: {error}")
    else:
        log_error(f"wrote the last collectives of rank {rank} to {path}")


def start_message(state: TrainingState) -> str:
    """Return a message that describes the model, the data and the resources of the training."""
    options, world = state.options, state.world
    epochs = options.training.epochs
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    where = f"{world.backend} on {world.device.type}" if world.rank_info.size > 1 else world.device.type
    if world.rank_info.size > 1 and options.ranks.communication != "plain":
        where += f", communication {options.ranks.communication}"
    text = (
        f"{options.model.name} ({parameters:,} parameters) on {state.data.name} "
        f"({len(state.data.train):,} {state.data.noun} to train, {len(state.data.test):,} to test): "
        f"{_count(world.rank_info.size, 'rank')}, {where}, {_count(torch.get_num_threads(), 'thread')} per rank, "
        f"batch {state.batch_size}, {_count(epochs, 'epoch')} of {_count(state.steps_per_epoch, 'step')}; "
        f"{state.precision.name}, {state.batch_builder.feed.description}"
    )
    if options.optimizer.scale_lr:
        size, lr = world.rank_info.size, options.optimizer.lr
        text += f"\nlearning rate {lr:g} x {_count(size, 'rank')} = {lr * size:g} (--scale-lr)"
    return text


def resume_message(state: TrainingState, path: Path, step: int, epochs_before: int | None) -> str:
    """Return a message about the step at which the training resumes. ``epochs_before`` is None if unknown."""
    epochs = state.options.training.epochs
    if not epochs:
        return f"resumed from {path}: evaluating step {step} (--epochs 0)"
    if step >= state.num_steps:
        done = f"all {state.num_steps} steps are done"
        if step > state.num_steps:
            done = f"the checkpoint is from step {step}, but this training has only {state.num_steps} steps"
        return (
            f"resumed from {path}: {done}, so nothing is left to train "
            "(give more --epochs to continue, or another --checkpoint-dir to start from the beginning)"
        )
    epoch = step // state.steps_per_epoch + 1
    text = f"resumed from {path}: continuing at step {step + 1} of {state.num_steps} (epoch {epoch})"
    if epochs_before not in (None, 0, epochs):
        now = f"the training now has {_count(epochs, 'epoch')} instead of {epochs_before}"
        text += f"; {now}, so the learning-rate schedule is adapted"
    return text


def stop_message(state: TrainingState, step: int, checkpoint: Path | None, *, by: str) -> str:
    """Return a message about what stopped the training (``by``) after ``step`` steps, and how to resume it."""
    # A launcher that sets the checkpoint folder of each run prints how to resume it.
    how = "" if names.CHECKPOINT_DIR in os.environ else "; the same command continues from there"
    return f"stopped by {by} after step {step} of {state.num_steps}: saved {checkpoint}{how}"


def summary_message(
    state: TrainingState, result: TrainResult, *, evaluation: Evaluation, checkpoint: Path | None
) -> str:
    """Return a message with the results of a complete training."""
    speed = f"{result.num_images / result.seconds:.0f}" if result.seconds else "nothing was trained"
    images, counts = isinstance(state.data, ImageDataset), f"{evaluation.num_correct} of {evaluation.num_predicted}"
    return "\n".join(
        (
            f"world size     {state.world.rank_info.size}",
            f"test accuracy  {100 * evaluation.accuracy:.2f} % ({counts} {'images' if images else 'bytes'})",
            *([] if images else [f"bits a byte    {evaluation.bits:.4f}"]),
            f"{state.data.noun + '/s':14} {speed}",
            *([f"checkpoint     {checkpoint}"] if checkpoint else []),
            f"weights sha256 {fingerprint(state.model.state_dict())}",
        )
    )


def cost_message(state: TrainingState, spent_s: Sequence[Mapping[str, float]], phases: Mapping[str, float]) -> str:
    """Return how the ranks used their time (``spent_s``: seconds of each rank by cause), and the peak memory."""
    total_s = {cause: sum(rank_s[cause] for rank_s in spent_s) for cause in spent_s[0]}
    whole_s, productive_s = sum(total_s.values()), total_s.pop("productive")
    names = {"startup": "start-up", "checkpoint": "checkpoints"}
    lost = (f"{names.get(cause, cause)} {_percent(seconds, whole_s)}" for cause, seconds in total_s.items() if seconds)
    share = catalogue.goodput(productive_s, whole_s - productive_s) or 0.0
    lines = [
        f"goodput        {100 * share:.0f} % of {whole_s / len(spent_s):.1f} s per rank (new steps); " + ", ".join(lost)
    ]
    if steps_s := sum(phases.values()):
        compute = "compute" if "comm_exposed" in phases else "compute and communication (not measured apart)"
        groups = {"data": ("data", "h2d"), compute: ("forward", "backward", "optimizer")}
        groups |= {"communication": ("comm_exposed",), "other": ("other",)}
        known = {name: [phases[phase] for phase in group] for name, group in groups.items() if group[0] in phases}
        parts = (f"{name} {_percent(sum(seconds), steps_s)}" for name, seconds in known.items())
        lines.append("a step         " + ", ".join(parts))
    cuda = state.world.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines.append(f"peak memory    {peak / 2**20:,.0f} MiB of the {'GPU' if cuda else 'process'}, rank 0")
    return "\n".join(lines)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
