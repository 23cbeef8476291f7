"""Whoever says when a run is ended from outside, its ranks are asked in time to save."""

import subprocess
import sys
import time
from typing import Any

import pytest

from ddprun import deadline
from ddprun.deadline import Deadline
from ddprun.errors import NodeError

SLURM = {"SLURM_JOB_END_TIME": "1893456000"}


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, None),
        ("90", {}, Deadline(source="--deadline", after_s=90)),
        ("2030-01-01T01:00:00+01:00", {}, Deadline(source="--deadline", at=1893456000)),
        (None, {"DDP_DEADLINE": "2030-01-01T00:00:00Z"}, Deadline(source="DDP_DEADLINE", at=1893456000)),
        (None, SLURM, Deadline(source="SLURM_JOB_END_TIME", at=1893456000, margin_s=30)),
        ("90", SLURM | {"DDP_DEADLINE": "80"}, Deadline(source="--deadline", after_s=90)),
    ],
)
def test_who_says_it(flag: str | None, environ: dict[str, str], expected: Deadline | None) -> None:
    assert deadline.read(flag, environ, grace_s=30, now=1893450000) == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2029-12-31T23:59:00+00:00", "is '2029-12-31T23:59:00+00:00', which is over: give a time to come"),
        (
            "2030-01-01T00:00:20+00:00",
            "is 2030-01-01T00:00:20+00:00, but ranks get 30 s to save, and ddprun needs 5 s more: "
            "give more than 35 s from now, or a shorter --grace",
        ),
    ],
)
def test_a_time_in_which_nothing_can_be_saved(text: str, told: str) -> None:
    with pytest.raises(NodeError) as refused:
        deadline.read(text, {}, grace_s=30, now=1893456000)
    assert (str(refused.value), refused.value.outcome.code) == (f"--deadline {told}", 78)


@pytest.mark.parametrize(
    ("at", "after_s", "asked_after_s", "left_s"),
    [(-50.0, 0.0, 0.0, 0), (6.4, 0.0, 0.5, 6), (None, 106.4, 0.5, 6), (None, 50.0, 0.0, 0)],
)
def test_the_grace_and_the_margin_end_with_it(
    runs: Any, at: float | None, after_s: float, asked_after_s: float, left_s: int
) -> None:
    said: list[str] = []
    asked: list[float] = []
    now = time.time()
    due = Deadline(source="--deadline", at=None if at is None else now + at, after_s=after_s)
    deadline.watch(due, started=now - 100, grace_s=0.9, ask=lambda: asked.append(time.time()), say=said.append)
    runs.until(lambda: asked, 5)
    assert asked_after_s - 0.01 < asked[0] - now < asked_after_s + 0.9
    assert said == [f"the deadline (--deadline) is in {left_s} s: the ranks are asked to save and stop"]


def test_ranks_save_before_the_deadline(runs: Any) -> None:
    began_at = time.time()
    node = runs.start("act.py", "all=save", options=("--grace", "0.9"), env={"DDP_DEADLINE": "20"})
    assert node.end() == 143
    assert 14 - 5 < time.time() - began_at < 20
    assert node.log(0) in ("ready\nsaved on SIGTERM\n", "")  # nothing: on a machine under load it was still starting
    assert (node.outcome().cause, node.outcome().code, node.outcome().retry) == ("stopped", 143, True)
    assert [line for line in node.said() if "deadline" in line] == [
        "[node0] the deadline (DDP_DEADLINE) is in 6 s: the ranks are asked to save and stop"
    ]


ASKED_TWICE = """
import os, signal, time
from ddprun.signals import Signals
heard = []
signals = Signals(heard.append, print)
signals.listen()
os.kill(os.getpid(), signal.SIGTERM)
while not heard:
    time.sleep(0.01)
signals.stop()  # the deadline, or the launcher's end
time.sleep(0.3)
print(len(heard))
os.kill(os.getpid(), signal.SIGTERM)  # a person, who means it
while len(heard) < 2:
    time.sleep(0.01)
print([int(number) for number in heard])
"""


def test_a_deadline_takes_no_grace_from_ranks_that_were_asked_already() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("1\n[15, 15]\n", "")
