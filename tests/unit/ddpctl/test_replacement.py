"""Lost nodes of a run that is followed: their spare machines, their logs, and the record of the run."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ddpctl.test_run_store import make

from ddpctl.command import Verb
from ddpctl.execution.executor import Executor
from ddpctl.operations import launcher, replacement
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery, Moved

MOVED = {"hosts": [0, 2]}


class Spares:
    """A target that has replaced node 1 when it is asked first. Its run ends when it was asked again."""

    capabilities = frozenset({"stop"})

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.followed: list[tuple[int, ...]] = []
        self.over = threading.Event()

    def has_spares(self, _: Run) -> bool:
        return True

    def replace_lost(self, run: Run) -> Verb[Moved]:
        yield ()
        self.requests.append(run.handle)
        if len(self.requests) == 1:
            return Moved(handle=MOVED, nodes=(1,), note="node 1 is on box2")
        self.over.set()
        return Moved(handle=run.handle)

    def logs(self, _: Run, query: LogQuery) -> Verb[None]:
        yield ()
        self.followed.append(query.nodes)
        assert query.nodes or self.over.wait(20)

    def status(self, runs: tuple[Run, ...], **_: object) -> Verb[tuple[RunStatus, ...]]:
        yield ()
        return tuple(RunStatus(run=run.name, state="succeeded", message="", code=0) for run in runs)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacement, "POLL_S", 0.01)


def test_a_lost_node_of_a_followed_run_is_replaced_and_its_log_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, notes, run = Spares(), list[str](), make(tmp_path, "night", 1.0)
    monkeypatch.setattr(launcher, "target_of", lambda _: target)
    context = AppContext(executor=Executor(os.environ), root=tmp_path, emit=notes.append)
    assert launcher.follow(context, run)[1] == 0
    assert (target.requests[:2], sorted(target.followed)) == ([run.handle, MOVED], [(), (1,)])
    assert (run_store.load(tmp_path, "night").handle, notes) == (MOVED, ["node 1 is on box2"])


class Stopping(SimpleNamespace):
    """A run that was asked to stop, which somebody has looked at three times."""

    @property
    def times(self) -> int:
        self.looks -= 1
        if not self.looks:
            self.seen.set()
        return 1


def test_a_run_that_is_being_stopped_gets_no_other_machine(tmp_path: Path) -> None:
    target: Any = Spares()
    followed: Any = Stopping(run=make(tmp_path, "night", 1.0), looks=3, seen=threading.Event())
    with replacement.replacing_lost_nodes(Executor(os.environ), target, followed, emit=print):
        assert followed.seen.wait(20)
    assert target.requests == []
