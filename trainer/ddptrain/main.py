"""One rank from its options to its exit code: world, data, model, checkpoint, loop, farewell."""

import gc
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ddptrain import debugging, report
from ddptrain.datasets import SOURCES
from ddptrain.datasets.dataset import DataSet
from ddptrain.datasets.kaggle import locate
from ddptrain.diagnosis import nonfinite
from ddptrain.errors import TrainError
from ddptrain.evaluate import count_right
from ddptrain.guard import Guard, NonFinite
from ddptrain.job import Job, global_batch_size, prepare
from ddptrain.keeping import Keeping
from ddptrain.ledger import Ledger
from ddptrain.loop import Fitted, fit
from ddptrain.metrics import open_metrics
from ddptrain.models import pretrained
from ddptrain.options import Options
from ddptrain.phases import measure
from ddptrain.place import Place, read_place
from ddptrain.profiling import Tracer
from ddptrain.progress import Teller, teller
from ddptrain.shelf import Shelf
from ddptrain.stop import Stop
from ddptrain.straggler import Comparison
from ddptrain.strategy import check_strategy
from ddptrain.watch import Watch
from ddptrain.world import agree, enter, join, lost_a_peer, set_up_torch
from ddpwire.exits import Exit
from ddpwire.heartbeat import HEARTBEAT_FILE, Heart
from ddpwire.signals import Signals


def run(options: Options, environ: Mapping[str, str], signals: Signals, *, started: float | None = None) -> int:
    """Train, and return the exit code, the same on every rank. What is wrong is told in one line by one rank.

    ``started``: time.monotonic() of the process' start.
    """
    place = Place()
    ledger = Ledger(time.monotonic() if started is None else started)
    try:
        place = read_place(environ, options.ranks)
        return _train(options, place, environ, signals, ledger)
    except TrainError as error:
        if error.rank in (None, place.rank):
            _complain(error.message)
        return error.code
    except Exception as error:
        if options.watch.debug and place.size > 1:
            debugging.dump_collectives(place.rank, Path(), say=_complain)
        if not lost_a_peer(error):
            traceback.print_exc()
            return Exit.SOFTWARE
        _complain(f"rank {place.rank} lost the other ranks: {str(error).splitlines()[0]}")
        return signals.code or Exit.ABSENT


def _train(options: Options, place: Place, environ: Mapping[str, str], signals: Signals, ledger: Ledger) -> int:
    batch_size = global_batch_size(options.training, place)
    check_strategy(options, place)
    set_up_torch(place, environ, deterministic=options.machine.deterministic)
    if options.watch.debug:
        debugging.set_up()
    join(place, options.ranks)
    world = enter(place, options.machine.device, options.ranks)
    shelf = agree(place, lambda: Shelf(options.checkpoints.folder) if place.first else None)
    options = replace(options, data=agree(place, partial(locate, options.data, environ)))
    data = _load_data(options, place)
    job = agree(place, lambda: prepare(options, world, data, batch_size=batch_size))
    tell = teller(first=place.first, environ=environ)
    tell.say(report.headline(job))

    guard, metrics, heart = Guard(world.device), open_metrics(environ), _heart(environ)
    keeping = Keeping(job, shelf, metrics, ledger, alive=heart.beat)
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
        ranks=Comparison(place.rank, place.size, tell=tell.say),
        tracer=Tracer(options.watch.profile, options.watch.profile_dir / f"rank-{place.rank}.json", say=_complain),
        teller=tell,
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
    watch.ranks.answer(fitted.step)
    _farewell(job, fitted, keeping, watch, tell, timed_out=stop.timed_out)
    if place.size > 1:
        del job, keeping  # and with them DDP's hold on gloo, which else may abort the process as it ends
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
    """The data set, and the weights to start from.

    Downloaded by rank 0 first, which is enough where nodes share a folder, then by one rank a node.
    """
    source = SOURCES[options.data.name]
    fetches = [partial(source.prepare, options.data)] if source.prepare else []
    if options.model.pretrained:
        fetches.append(partial(pretrained.fetch, options.model))
    turn = 0 if place.first else 1 if place.local_rank == 0 else None
    for fetch in fetches:
        for now in (0, 1):
            agree(place, fetch if turn == now else _nothing)
    return agree(place, partial(source.load, options.data, options.training.seed))


def _farewell(job: Job, fitted: Fitted, keeping: Keeping, watch: Watch, tell: Teller, *, timed_out: bool) -> None:
    """See to it that the last step is saved, and say how it ended. Raises TrainError when it cannot be saved."""
    accuracy = None if fitted.right is None else fitted.right / len(job.test)
    path = keeping.finish(fitted.step, accuracy)
    if fitted.exit_code:
        tell.say(report.stopped(job, fitted, path, timed_out=timed_out))
    else:
        right = count_right(job) if fitted.right is None else fitted.right
        tell.say(report.costs(job, watch.ledger, watch.phases.totals))
        tell.say(report.summary(job, fitted, right=right, checkpoint=path))
    watch.last_words()


def _nothing() -> None:
    """What the other ranks do while one acts."""


def _complain(message: str) -> None:
    print(f"ddptrain: {message}", file=sys.stderr, flush=True)
