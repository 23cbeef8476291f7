"""Real ddpruns on the loopback, and the question who of their families is still alive.

ddprun is a fork (tests/forks.py). In the tests that a module lists as EXECUTED it is executed, as by a person.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import forks

from ddprun import network
from ddpwire.events import Event, read_events
from ddpwire.run_files import NodeState, Outcome, read_node, read_outcome

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # a store that goes with its test is no news
SCRIPTS = Path(__file__).parent / "scripts"


def until(condition: Callable[[], Any], timeout_s: float = 240.0) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return answer


@dataclass(kw_only=True)
class Node:
    process: subprocess.Popen[bytes]
    folder: Path
    stdout: Path
    stderr: Path

    def end(self, timeout_s: float = 240.0) -> int:
        return self.process.wait(timeout_s)

    def state(self) -> NodeState:
        return read_node((self.folder / "node.json").read_text())

    def rank_pid(self, local_rank: int) -> int:
        """The process of a rank. ddprun records it after it has started all ranks, so a rank may be ready earlier."""
        until(lambda: self.state().ranks)
        return self.state().ranks[local_rank].pid

    def outcome(self) -> Outcome:
        return read_outcome((self.folder / "outcome.json").read_text())

    def facts(self) -> Outcome:
        """The outcome without its message, whose wording is in the golden file."""
        return replace(self.outcome(), message="")

    def events(self) -> tuple[Event, ...]:
        return read_events((self.folder / "events.jsonl").read_text())

    def log(self, rank: int) -> str:
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"rank-{rank}.log").read_text()
        return ""

    def said(self) -> list[str]:
        """ddprun's own lines, without what differs from run to run: the metrics' address, the folder, waits."""
        lines = self.stderr.read_text().replace(str(self.folder.parent), "RUN").splitlines()
        own = [line for line in lines if re.match(r"\[node\d+\] |ddprun: ", line)]
        return [line for line in own if "metrics at" not in line and not line.endswith(" s so far")]

    def shown(self) -> list[str]:
        """The ranks' lines on the console, stdout's before stderr's."""
        lines = [*self.stdout.read_text().splitlines(), *self.stderr.read_text().splitlines()]
        return [line for line in lines if not re.match(r"\[node\d+\] |ddprun: ", line)]


@dataclass(kw_only=True)
class Runs:
    run_dir: Path
    executed: bool = False
    nodes: list[Node] = field(default_factory=list)

    def start(
        self,
        script: str,
        *args: str,
        node: int = 0,
        nodes: str = "1",
        port: int = 0,
        options: tuple[str, ...] = (),
        **kw: Any,
    ) -> Node:
        """One ddprun. Everything of its family carries the run's folder in its environment."""
        place = ["--nnodes", nodes, "--node-rank", str(node)] if nodes != "1" else []
        place += ["--master-addr", "127.0.0.1", "--master-port", str(port)] if port else []
        stdout, stderr = (self.run_dir.parent / f"{node}.{len(self.nodes)}.{name}" for name in ("out", "err"))
        env = os.environ | {"DDP_RUN_DIR": str(self.run_dir)} | kw.pop("env", {})
        with stdout.open("wb") as out, stderr.open("wb") as err:
            command = ["-m", "ddprun", *place, *options, str(SCRIPTS / script), *args]
            process = forks.start(command, env=env, executed=self.executed, stdout=out, stderr=err, **kw)
        started = Node(process=process, folder=self.run_dir / f"node-{node}", stdout=stdout, stderr=stderr)
        self.nodes.append(started)
        return started

    def pair(
        self, script: str, *args: str, local_world_size: int = 1, options: tuple[str, ...] = ()
    ) -> tuple[Node, Node]:
        """Two nodes of one run; the later one is started first."""
        port = self.free_port()
        options = (*options, "--nproc-per-node", str(local_world_size))
        second = self.start(script, *args, node=1, nodes="2", port=port, options=options)
        return self.start(script, *args, node=0, nodes="2", port=port, options=options), second

    until = staticmethod(until)

    @staticmethod
    def free_port() -> int:
        with network.bind_free_port("127.0.0.1") as listener:
            return int(listener.getsockname()[1])

    @staticmethod
    def wait_until_ready(*nodes: Node) -> None:
        """Until the first rank of each node, one a node, has said that it is ready."""
        until(lambda: all(node.log(rank).startswith("ready") for rank, node in enumerate(nodes)))

    def alive(self) -> list[str]:
        """Every living process of the run, however far it has gone from its parents."""
        found = []
        forked = set(forks.descendants())
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                mine = process in forked or process.environ().get("DDP_RUN_DIR") == str(self.run_dir)
                if mine and forks.is_alive(process):
                    found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        return found

    def nothing_is_left(self, timeout_s: float = 20.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        return True


@pytest.fixture
def runs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """A run's folder; nothing of the run may outlive the test."""
    runs = Runs(run_dir=tmp_path / "run", executed=request.function.__name__ in getattr(request.module, "EXECUTED", ()))
    yield runs
    with contextlib.suppress(AssertionError):
        until(lambda: not runs.alive(), 20.0)
    left = runs.alive()
    for line in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.partition(":")[0]), signal.SIGKILL)
    for node in runs.nodes:
        node.process.wait(60)
    assert left == []
