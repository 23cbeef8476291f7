"""Real ranks as real processes, started by hand with the variables of a rank, and all gone at the end of a test.

They are forks (tests/forks.py), except where the start of a process is the point.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests import forks

TIMEOUT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One rank's end."""

    code: int
    out: str
    err: str

    @property
    def fingerprint(self) -> str:
        """Of the final weights."""
        return re.findall(r"^weights sha256 ([0-9a-f]{16})$", self.out, re.MULTILINE)[0]

    @property
    def right(self) -> int:
        """Held-out images classified rightly."""
        return int(re.findall(r"^test accuracy .* \((\d+) of \d+ images\)$", self.out, re.MULTILINE)[0])


class World:
    """The ranks of one training, running."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, environs: Sequence[Mapping[str, str]], executed: bool
    ) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.ranks = [forks.start(command, cwd=cwd, env=environ, executed=executed, **pipes) for environ in environs]

    def wait_for(self, start: str) -> None:
        """Read rank 0's stdout up to the line that starts so."""
        stdout = self.ranks[0].stdout
        assert stdout is not None
        while not (line := stdout.readline()).startswith(start):
            assert line, f"rank 0 ended before {start!r}: {self.ranks[0].stderr.read()}"

    def end(self) -> list[Ended]:
        """Wait for all ranks."""
        deadline = time.monotonic() + TIMEOUT_S
        ended = []
        for process in self.ranks:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            ended.append(Ended(code=process.returncode, out=out, err=err))
        return ended

    def kill(self) -> None:
        """SIGKILL to all that still run."""
        for process in self.ranks:
            process.kill()
            process.communicate()


Start = Callable[..., World]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ranks of ddptrain, or of another ``command``, in the test's folder."""
    worlds: list[World] = []

    def start_ranks(
        *options: str,
        size: int = 1,
        node_size: int | None = None,
        command: Sequence[str] = ("-m", "ddptrain"),
        environ: Mapping[str, str] | None = None,
        executed: bool = False,
    ) -> World:
        environs = _environs(size, node_size or size, environ or {})
        worlds.append(World([*command, *options], cwd=tmp_path, environs=environs, executed=executed))
        return worlds[-1]

    yield start_ranks
    for world in worlds:
        world.kill()


@pytest.fixture
def train(start: Start) -> Callable[..., list[Ended]]:
    """Start ranks and wait for their end."""
    return lambda *options, **how: start(*options, **how).end()


def _environs(size: int, node_size: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """The environment of each rank."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if size > 1 else {}
    world = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(node_size), **master}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank % node_size)} for rank in range(size)]
    return [{**os.environ, **world, **of_rank, **environ} for of_rank in ranks]
