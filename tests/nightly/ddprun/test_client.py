"""The library for scripts, in real processes: who hears a signal, who agrees, what it costs."""

import re
import signal
import socket
from pathlib import Path

import pytest
from tests.unit.ddprank import test_client
from tests.unit.ddprank.test_client import Start, wait_for

from ddprank.heartbeat import read_beat

start = test_client.start  # the fixture


@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_stop_at_the_same_step(start: Start, signalled: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    hearts = [tmp_path / f"heartbeat-{rank}" for rank in (0, 1)]
    ranks = [start("ranks", RANK=str(rank), DDP_HEARTBEAT_FILE=str(hearts[rank]), **place) for rank in (0, 1)]
    for process in ranks:
        wait_for(process, "training")
    ranks[signalled].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=60) for process in ranks]
    assert outputs[0] == outputs[1]
    assert re.fullmatch(r"stopped at \d+\nfinally ran\natexit ran\n", outputs[0][0])
    assert (outputs[0][1], [process.returncode for process in ranks]) == ("", [143, 143])
    assert [read_beat(heart).stopped_for for heart in hearts] == [signalled, signalled]


def test_ranks_that_are_not_stopped_end_by_themselves(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [start("ranks", "short", RANK=str(rank), **place) for rank in (0, 1)]
    assert [process.communicate(timeout=60) for process in ranks] == [("training\nfinally ran\natexit ran\n", "")] * 2
    assert [process.returncode for process in ranks] == [0, 0]


def test_what_is_told_to_a_forked_child_is_not_told_to_the_loop(start: Start) -> None:
    process = start("fork", "short")
    assert process.communicate(timeout=30) == ("child -15\ntraining\nfinally ran\natexit ran\n", "")
    assert process.returncode == 0
