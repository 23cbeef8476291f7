"""Replaces lost nodes of an attached run with spare machines of the target."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from ddpctl.errors import DdpctlError
from ddpctl.execution.executor import Executor
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery, Moved, Target

POLL_S = 3.0
LAST_LINES_S = 5.0  # how long the logs of replacement nodes may take to end


class Replacement:
    """A context manager that replaces lost nodes of a run while its ``with`` block runs."""

    def __init__(
        self,
        executor: Executor,
        target: Target,
        run: Run,
        *,
        emit: Callable[[str], None],
        moved: Callable[[Run], None],
        stopping: Callable[[], bool],
    ) -> None:
        """``moved`` is called with the run's changed record. ``stopping`` returns whether the run is being stopped."""
        self._executor, self._target, self._run = executor, target, run
        self._emit, self._moved, self._stopping = emit, moved, stopping
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._said = ""

    def __enter__(self) -> Self:
        if self._target.has_spares(self._run):
            self._start(self._watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(LAST_LINES_S)

    def _start(self, act: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=act, name="replacement", daemon=True))
        self._threads[-1].start()

    def _watch(self) -> None:
        executor = self._executor.another()
        while not self._over.wait(POLL_S):
            if self._stopping():
                continue
            try:
                moved = executor.perform(self._target.replace_lost(self._run))
            except DdpctlError as error:
                moved = Moved(handle=self._run.handle, note=str(error))
            if moved.note and moved.note != self._said:
                self._emit(moved.note)
            self._said = moved.note
            if moved.nodes:
                self._run = replace(self._run, handle=moved.handle)
                run_store.save(self._run)
                self._moved(self._run)
                self._start(partial(self._follow, moved.nodes))
        executor.close()

    def _follow(self, nodes: tuple[int, ...]) -> None:
        executor = self._executor.another()
        try:
            executor.perform(self._target.logs(self._run, LogQuery(follow=True, nodes=nodes)))
        except DdpctlError as error:
            self._emit(str(error))
        executor.close()
