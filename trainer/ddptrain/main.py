"""One rank from its options to its exit code: world, data, model, checkpoint, loop, farewell."""

import gc
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ddptrain import report, resume
from ddptrain.checkpoint import Checkpoint, Saver, open_folder
from ddptrain.datasets import SOURCES
from ddptrain.datasets.dataset import DataSet
from ddptrain.errors import TrainError
from ddptrain.evaluate import count_right
from ddptrain.job import Job, global_batch_size, prepare
from ddptrain.loop import Fitted, fit
from ddptrain.metrics import Metrics, open_metrics
from ddptrain.options import Options, shaping
from ddptrain.place import Place, read_place
from ddptrain.strategy import check_strategy
from ddptrain.world import agree, broadcast, enter, join, lost_a_peer, set_up_torch
from ddpwire.exits import Exit
from ddpwire.heartbeat import HEARTBEAT_FILE, Heart
from ddpwire.signals import Signals
from ddpwire.vote import Vote


def run(options: Options, environ: Mapping[str, str], signals: Signals) -> int:
    """Train, and return the exit code, the same on every rank. What is wrong is told in one line by one rank."""
    place = Place()
    try:
        place = read_place(environ, options.ranks)
        return _train(options, place, environ, signals)
    except TrainError as error:
        if error.rank in (None, place.rank):
            _complain(error.message)
        return error.code
    except Exception as error:
        if not lost_a_peer(error):
            traceback.print_exc()
            return Exit.SOFTWARE
        _complain(f"rank {place.rank} lost the other ranks: {str(error).splitlines()[0]}")
        return signals.code or Exit.ABSENT


def _train(options: Options, place: Place, environ: Mapping[str, str], signals: Signals) -> int:
    batch_size = global_batch_size(options.training, place)
    check_strategy(options, place)
    set_up_torch(place, environ, deterministic=options.machine.deterministic)
    join(place, options.ranks)
    world = enter(place, options.machine.device, options.ranks)
    agree(place, partial(open_folder, options.checkpoints.folder) if place.first else _nothing)
    data = _load_data(options, place)
    job = agree(place, lambda: prepare(options, world, data, batch_size=batch_size))
    _say(place, report.headline(job))

    metrics = open_metrics(environ)
    saver = Saver(options.checkpoints.folder, keep=options.checkpoints.keep, metrics=metrics)
    first_step = _resume(job, saver, metrics)
    signals.can_save = True  # from here on a stop waits for the end of a step
    vote = Vote() if place.size > 1 else None
    fitted = fit(
        job,
        first_step=first_step,
        exit_code=lambda: vote.ask(signals.code) if vote else signals.code,
        heart=_heart(environ),
        metrics=metrics,
        say=partial(_say, place),
        save=partial(_save, job, saver),
    )
    if vote:
        vote.answer()
    _farewell(job, fitted, saver)
    if place.size > 1:
        del job  # and with it DDP's hold on gloo, which else may abort the process as it ends
        gc.collect()
        dist.barrier()
    return fitted.exit_code


def _heart(environ: Mapping[str, str]) -> Heart:
    try:
        return Heart(environ.get(HEARTBEAT_FILE))
    except OSError as error:
        _complain(f"training without a sign of life for ddprun: {error}")
        return Heart(None)


def _load_data(options: Options, place: Place) -> DataSet:
    """The data set. Downloaded by rank 0 first, which is enough where nodes share a folder, then by one rank a node."""
    source = SOURCES[options.data.name]
    if source.prepare:
        turn = 0 if place.first else 1 if place.local_rank == 0 else None
        for now in (0, 1):
            agree(place, partial(source.prepare, options.data) if turn == now else _nothing)
    return agree(place, partial(source.load, options.data, options.training.seed))


def _resume(job: Job, saver: Saver, metrics: Metrics) -> int:
    """Load what ``--resume`` says, chosen and read by rank 0, on every rank; the number of steps that are done."""
    how, place = job.options.checkpoints, job.world.place
    now = shaping(job.options, batch_size=job.batch_size)

    def find() -> tuple[Path, Checkpoint] | None:
        return resume.find(how.resume, how.folder, now, metrics) if place.first else None

    found = broadcast(place, agree(place, find))
    if found is None:
        return 0
    saver.newest, checkpoint = found
    for name, part in job.parts.items():
        part.load_state_dict(getattr(checkpoint, name))
    _say(place, report.resumed(job, saver.newest, checkpoint.step))
    return checkpoint.step


def _save(job: Job, saver: Saver, step: int) -> None:
    """Have rank 0 write a checkpoint, unless it did. The others need not wait."""
    if job.world.place.first and saver.newest != saver.path(step):
        shapes = shaping(job.options, batch_size=job.batch_size)
        state = {name: part.state_dict() for name, part in job.parts.items()}
        saver.save(Checkpoint(step=step, shaping=shapes, **state))


def _farewell(job: Job, fitted: Fitted, saver: Saver) -> None:
    """See to it that the last step is saved, and say how it ended. Raises TrainError when it cannot be saved."""
    place = job.world.place
    _save(job, saver, fitted.step)
    path = saver.path(fitted.step)
    if not broadcast(place, saver.newest == path):
        raise TrainError(
            Exit.CANNOT_WRITE, f"step {fitted.step} could not be saved as {path}; the one before it is whole"
        )
    if fitted.exit_code:
        _say(place, report.stopped(job, fitted, path))
        return
    right = fitted.right
    if right is None:
        right = count_right(job)
    _say(place, report.summary(job, fitted, right=right, checkpoint=path))


def _nothing() -> None:
    """What the other ranks do while one acts."""


def _say(place: Place, text: str) -> None:
    if place.first:
        print(text, flush=True)


def _complain(message: str) -> None:
    print(f"ddptrain: {message}", file=sys.stderr, flush=True)
