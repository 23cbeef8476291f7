"""One rank from its options to its exit code: world, data, model, checkpoint, loop, farewell."""

import gc
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ddptrain import debugging, flops, report
from ddptrain.datasets import SOURCES
from ddptrain.datasets.dataset import DataSet
from ddptrain.datasets.kaggle import locate
from ddptrain.diagnosis import nonfinite
from ddptrain.errors import TrainError
from ddptrain.evaluate import count_right
from ddptrain.guard import Guard, NonFinite
from ddptrain.job import Job, global_batch_size, prepare
from ddptrain.keeping import Keeping
from ddptrain.ledger import Ledger, lost_before, steps_before
from ddptrain.loop import Fitted, fit
from ddptrain.metrics import About, Metrics, open_metrics
from ddptrain.models import pretrained
from ddptrain.options import Options
from ddptrain.overlap import Overlap
from ddptrain.phases import measure
from ddptrain.place import Place, read_place
from ddptrain.profiling import Tracer
from ddptrain.progress import Teller, teller
from ddptrain.shelf import Shelf
from ddptrain.stop import Stop
from ddptrain.straggler import Comparison, Naming
from ddptrain.strategy import check_strategy
from ddptrain.watch import Watch
from ddptrain.whereabouts import named, whereabouts
from ddptrain.world import agree, enter, join, lost_a_peer, set_up_torch, timed_out
from ddpwire.events import EventLog, events_of
from ddpwire.exits import Exit
from ddpwire.heartbeat import HEARTBEAT_FILE, Heart
from ddpwire.signals import Signals

_DATA_ERRORS = {Exit.DATA: "corrupt", Exit.NO_INPUT: "missing"}


def run(options: Options, environ: Mapping[str, str], signals: Signals, *, started: float | None = None) -> int:
    """Train, and return the exit code, the same on every rank. What is wrong is told in one line by one rank.

    ``started``: time.monotonic() of the process' start.
    """
    place, metrics = Place(), Metrics()
    ledger = Ledger(time.monotonic() if started is None else started, steps_before=steps_before(environ))
    try:
        place = read_place(environ, options.ranks)
        metrics = open_metrics(environ, first=place.first)
        metrics.before(lost_before(environ, started=ledger.started))
        return _train(options, place, environ, signals, ledger, metrics)
    except TrainError as error:
        if error.rank in (None, place.rank):
            _complain(error.message)
        return error.code
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            metrics.out_of_memory()
        if options.watch.debug and place.size > 1:
            debugging.dump_collectives(place.rank, Path(), say=_complain)
        if not lost_a_peer(error):
            traceback.print_exc()
            return Exit.SOFTWARE
        if timed_out(error):
            metrics.timed_out()
        _complain(f"rank {place.rank} lost the other ranks: {str(error).splitlines()[0]}")
        return signals.code or Exit.ABSENT


def _train(
    options: Options, place: Place, environ: Mapping[str, str], signals: Signals, ledger: Ledger, metrics: Metrics
) -> int:
    batch_size = global_batch_size(options.training, place)
    check_strategy(options, place)
    set_up_torch(place, environ, deterministic=options.machine.deterministic)
    if options.watch.debug:
        debugging.set_up()
    join(place, options.ranks)
    world = enter(place, options.machine.device, options.ranks)
    shelf = agree(place, lambda: Shelf(options.checkpoints.folder) if place.first else None)
    options = replace(options, data=agree(place, partial(locate, options.data, environ)))
    data = _load_data(options, place, metrics)
    job = agree(place, lambda: prepare(options, world, data, batch_size=batch_size))
    tell = teller(first=place.first, environ=environ)
    tell.say(report.headline(job))

    guard, heart = Guard(world.device), _heart(environ)
    events = events_of(environ) if place.first else EventLog(None, node=0)
    where = whereabouts(place, environ)
    keeping = Keeping(job, shelf, metrics, ledger, events, alive=heart.beat)
    if metrics.on:
        metrics.about(_about(job))

    def tell_slow(naming: Naming, step: int) -> None:
        tell.say(named(naming, where[naming.rank], step))
        kind = "straggler" if naming.ratio else "straggler_gone"
        events.tell(kind, step=step, rank=naming.rank, node=where[naming.rank].node, ratio=round(naming.ratio, 2))

    resumed = keeping.resume()
    if resumed:
        tell.say(report.resumed(job, *resumed))
    stop = Stop(place, signals, guard, after_s=60 * options.watch.stop_after, started=ledger.started)
    watch = Watch(
        asked=stop.ask,
        heart=heart,
        metrics=metrics,
        ledger=ledger,
        phases=measure(world.device, job.model.parameters(), alone=place.size == 1),
        guard=guard,
        ranks=Comparison(place.rank, place.size, tell=tell_slow),
        tracer=Tracer(options.watch.profile, options.watch.profile_dir / f"rank-{place.rank}.json", say=_complain),
        teller=tell,
        overlap=Overlap(job.ddp),
        events=events,
        on_gpu=world.device.type == "cuda",
    )
    signals.can_save = True  # from here on a stop waits for the end of a step
    agree(place, watch.begin)
    try:
        fitted = fit(job, first_step=resumed[1] if resumed else 0, watch=watch, due=keeping.due, save=keeping.save)
    except NonFinite as error:
        raise nonfinite(job, error.step, metrics) from None
    finally:
        watch.close()
        keeping.settle()
    stop.close()
    if fitted.exit_code and stop.told is not None:
        heart.stopped_for(stop.told)
    watch.ranks.answer(fitted.step)
    _farewell(job, fitted, keeping, watch, tell, stop)
    if place.size > 1:
        del job, keeping  # and with them DDP's hold on gloo, which else may abort the process as it ends
        gc.collect()
        dist.barrier()
    return fitted.exit_code


def _about(job: Job) -> About:
    return About(
        backend=job.world.backend if job.world.place.size > 1 else "none",
        device=job.world.device.type,
        model=job.options.model.name,
        dataset=job.data.name,
        num_steps=job.num_steps,
        flops_a_sample=flops.of_a_step(job),
    )


def _heart(environ: Mapping[str, str]) -> Heart:
    try:
        return Heart(environ.get(HEARTBEAT_FILE))
    except OSError as error:
        _complain(f"training without a sign of life for ddprun: {error}")
        return Heart(None)


def _load_data(options: Options, place: Place, metrics: Metrics) -> DataSet:
    """The data set, and the weights to start from.

    Downloaded by rank 0 first, which is enough where nodes share a folder, then by one rank a node.
    """
    try:
        return _loaded(options, place)
    except TrainError as error:
        if error.rank in (None, place.rank) and error.code in _DATA_ERRORS:
            metrics.data_error(_DATA_ERRORS[error.code])
        raise


def _loaded(options: Options, place: Place) -> DataSet:
    source = SOURCES[options.data.name]
    fetches = [partial(source.prepare, options.data)] if source.prepare else []
    if options.model.pretrained:
        fetches.append(partial(pretrained.fetch, options.model))
    turn = 0 if place.first else 1 if place.local_rank == 0 else None
    for fetch in fetches:
        for now in (0, 1):
            agree(place, fetch if turn == now else _nothing)
    return agree(place, partial(source.load, options.data, options.training.seed))


def _farewell(job: Job, fitted: Fitted, keeping: Keeping, watch: Watch, tell: Teller, stop: Stop) -> None:
    """See to it that the last step is saved, and say how it ended. Raises TrainError when it cannot be saved."""
    accuracy = None if fitted.right is None else fitted.right / len(job.test)
    path = keeping.finish(fitted.step, accuracy)
    if fitted.exit_code:
        tell.say(report.stopped(job, fitted, path, timed_out=stop.timed_out, another=stop.told_another))
    else:
        right = count_right(job) if fitted.right is None else fitted.right
        tell.say(report.costs(job, watch.ledger, watch.phases.totals))
        tell.say(report.summary(job, fitted, right=right, checkpoint=path))
    watch.last_words()
    lost = {cause: round(seconds, 3) for cause, seconds in watch.ledger.lost_s.items() if seconds}
    watch.events.tell(
        "training_ended",
        step=fitted.step,
        seconds=watch.ledger.total_s,
        productive_s=round(watch.ledger.productive_s, 3),
        lost_s=lost,
    )


def _nothing() -> None:
    """What the other ranks do while one acts."""


def _complain(message: str) -> None:
    print(f"ddptrain: {message}", file=sys.stderr, flush=True)
