"""Replaces lost nodes of an attached run with spare machines of the target."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from ddpctl.errors import DdpctlError
from ddpctl.execution.executor import Executor
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery, Moved, Target

POLL_S = 3.0
LAST_LINES_S = 5.0  # how long the logs of replacement nodes may take to end


class Followed(Protocol):
    """A run that this process follows."""

    run: Run  # its record, which changes with its machines
    times: int  # how often it was asked to stop


@contextmanager
def replacing_lost_nodes(
    executor: Executor, target: Target, followed: Followed, *, emit: Callable[[str], None]
) -> Iterator[None]:
    """Replace lost nodes of a run while the ``with`` block runs, unless the run is being stopped."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def start(act: Callable[..., None], *args: object) -> None:
        threads.append(threading.Thread(target=act, args=args, name="replacement", daemon=True))
        threads[-1].start()

    def watch() -> None:
        note, own = "", executor.another()
        while not over.wait(POLL_S):
            if followed.times:
                continue
            run = followed.run
            try:
                answer = own.perform(target.replace_lost(run))
            except DdpctlError as error:
                answer = Moved(handle=run.handle, note=str(error))
            if answer.note and answer.note != note:
                emit(answer.note)
            note = answer.note
            if answer.nodes:
                run = replace(run, handle=answer.handle)
                run_store.save(run)
                followed.run = run
                start(_follow, executor.another(), target, run, answer.nodes, emit)
        own.close()

    if target.has_spares(followed.run):
        start(watch)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(LAST_LINES_S)


def _follow(executor: Executor, target: Target, run: Run, nodes: tuple[int, ...], emit: Callable[[str], None]) -> None:
    try:
        executor.perform(target.logs(run, LogQuery(follow=True, nodes=nodes)))
    except DdpctlError as error:
        emit(str(error))
    executor.close()
