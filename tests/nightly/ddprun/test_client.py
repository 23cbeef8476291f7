"""The library for scripts, in real processes: who hears a signal, who agrees, what it costs."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import forks

from ddpwire.heartbeat import read_stopped_for

LOOP = Path(__file__).parent / "scripts" / "loop.py"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start the loop; it is gone at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start_loop(*words: str, **environ: str) -> subprocess.Popen[str]:
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environ
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        executed = "ranks" not in words  # which import torch
        started.append(forks.start([str(LOOP), *words], env=env, executed=executed, **pipes))
        return started[-1]

    yield start_loop
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == f"{line}\n"


@pytest.mark.parametrize("told", [0, 1])
def test_all_ranks_stop_at_the_same_step(start: Start, told: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    hearts = [tmp_path / f"heartbeat-{rank}" for rank in (0, 1)]
    ranks = [start("ranks", RANK=str(rank), DDP_HEARTBEAT_FILE=str(hearts[rank]), **place) for rank in (0, 1)]
    for process in ranks:
        wait_for(process, "training")
    ranks[told].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=60) for process in ranks]
    assert said[0] == said[1]
    assert re.fullmatch(r"stopped at \d+\nfinally ran\natexit ran\n", said[0][0])
    assert (said[0][1], [process.returncode for process in ranks]) == ("", [143, 143])
    assert [read_stopped_for(heart) for heart in hearts] == [told, told]


def test_ranks_that_are_not_stopped_end_by_themselves(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start("ranks", "short", RANK=str(rank), **place) for rank in (0, 1)]
    assert [process.communicate(timeout=60) for process in ranks] == [("training\nfinally ran\natexit ran\n", "")] * 2
    assert [process.returncode for process in ranks] == [0, 0]
