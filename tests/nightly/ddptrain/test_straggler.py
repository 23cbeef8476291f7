"""The rank that the others wait for is named, and no other ever."""

import random
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain.test_straggler import reports

from ddptrain.straggler import COMPARISON_S, LASTING_S, StragglerPolicy
from ddpwire.events import read_events

HOST = socket.gethostname()
SLOW_FOR_A_WHILE = """
import os, runpy, sys, time
from ddptrain.data.loader import BatchBuilder

batch, steps = BatchBuilder.batch, 0

def paced(builder, indices_B, **how):
    # Every rank takes 70 ms, and rank 1 three times as long in the second epoch.
    global steps
    steps += 1
    time.sleep(0.21 if os.environ["RANK"] == "1" and 45 < steps <= 90 else 0.07)
    return batch(builder, indices_B, **how)

BatchBuilder.batch = paced
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


@pytest.mark.parametrize(("size", "step_s"), [(2, 0.1), (3, 0.1), (2, 0.02)])
def test_named_within_20_long_steps_five_of_five_and_nobody_in_1000_healthy_ones(
    train: Callable[..., list], size: int, step_s: float
) -> None:
    command = (str(Path(__file__).with_name("straggling.py")), str(step_s))
    ended = train(size=size, command=command, environ={"NODE_RANK": "3"})
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * size
    lines = ended[0].out.splitlines()
    assert len(lines) == 10
    for spell, (slow, again) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        begins = 1000 + 301 * spell
        assert begins < step_of(slow) <= begins + (20 if step_s > 0.05 else 85)
        assert 2 < float(re.findall(r"([\d.]+) times", slow)[0]) < 4.5
        assert begins + 150 < step_of(again) <= begins + 150 + (35 if step_s > 0.05 else 130)
    for every_second in (lines[::2], lines[1::2]):
        (line,) = {without_numbers(line) for line in every_second}
        assert_names(line, "rank 1", "node 3")


def test_a_rank_that_is_no_longer_slow_is_an_event(train: Callable[..., list], tmp_path: Path) -> None:
    environ = {"DDP_EVENTS_FILE": str(tmp_path / "events.jsonl")}
    ended = train("--epochs", "5", size=2, command=("-c", SLOW_FOR_A_WHILE), environ=environ)
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    events = [event for event in read_events((tmp_path / "events.jsonl").read_text()) if "straggler" in event.event]
    assert [event.event for event in events[:2]] == ["straggler", "straggler_gone"]
    assert [event.rank for event in events[:2]] == [1, 1]
    slow, gone = (event.step or 0 for event in events[:2])
    assert 45 < slow < gone


def step_of(line: str) -> int:
    return int(line.partition(":")[0].removeprefix("step "))


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.]+ times", "N times", line.replace(f"step {step_of(line)}:", "step N:")).replace(HOST, "HOST")


def test_no_more_false_reports_than_stated_by_chance_alone() -> None:
    """Healthy ranks that are slow in one of ten comparisons: 0.5 reports are expected of 50,000."""
    chance = random.Random(0)
    policy = StragglerPolicy(2)
    comparisons = (tuple(0.3 if chance.random() < 0.1 else 0.1 for _ in range(2)) for _ in range(50_000))
    assert sum(1 for events in reports(policy, *comparisons) for event in events if event.ratio) <= 3


def test_short_steps_are_joined_and_one_fast_step_clears_a_rank() -> None:
    policy = StragglerPolicy(2)
    slow = [policy.update((0.01, 0.03), seconds=0.1) for _ in range(80)]
    (named,) = (number for number, events in enumerate(slow) if events)
    assert LASTING_S / 0.1 - 1 <= named <= (LASTING_S + 2 * COMPARISON_S) / 0.1
    policy = StragglerPolicy(2)
    own_s = [(0.01, 0.01 if number % 5 == 0 else 0.03) for number in range(200)]
    assert not any(policy.update(seconds, seconds=0.1) for seconds in own_s)
