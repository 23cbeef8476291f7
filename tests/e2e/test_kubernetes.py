"""ddpctl on Kubernetes, as processes, with a kubectl that stands in for a cluster: what it leaves, however it ends."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.driver import DDPCTL, ddpctl, wait_until
from tests.e2e.kubernetes_standin import StandIn, make_standin
from tests.terminal import Session

LAUNCH = ("launch", "-t", "kubernetes", "--kind", "pytorchjob", "--nodes", "2")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = make_standin(tmp_path / "cluster")
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    return found


def followers(cluster: StandIn) -> int:
    return sum("log_follower" in line for line in cluster.processes().values())


@pytest.mark.parametrize("end", ["TERM", "HUP", "KILL", "terminal"])
def test_what_follows_the_pods_ends_with_its_ddpctl(cluster: StandIn, tmp_path: Path, end: str) -> None:
    assert ddpctl(*LAUNCH, "--name", "dawn", "--detach").returncode == 0
    verbs = ("logs", "-f", "dawn"), ("attach", "dawn")
    if end == "terminal":
        sessions = [Session([*DDPCTL, *verb]) for verb in verbs]
        for session in sessions:
            session.wait_for("[node1 rank0] epoch 1/9")
            assert followers(cluster)
        for session in sessions:
            session.close()
    else:
        reader, writer = os.pipe()
        started = [subprocess.Popen([*DDPCTL, *verb], stdout=writer, stderr=writer) for verb in verbs]
        os.close(writer)
        with open(reader) as lines:
            for _ in verbs:
                next(line for line in lines if line == "[node1 rank0] epoch 1/9\n")
            assert followers(cluster) == 2
            for process in started:
                process.send_signal(signal.Signals[f"SIG{end}"])
            assert [process.wait(60) for process in started] == [{"TERM": 143, "HUP": 143, "KILL": -9}[end]] * 2
            lines.read()  # nobody holds the pipe open
    wait_until(lambda: not cluster.processes(), "all to end")
    assert cluster.objects() == ["networkpolicy.dawn", "pytorchjob.dawn"]
