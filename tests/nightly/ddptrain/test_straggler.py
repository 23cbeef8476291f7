"""The rank that the others wait for is named, and no other ever."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.messages import assert_names

HOST = socket.gethostname()


@pytest.mark.parametrize(("size", "step_s"), [(2, 0.1), (3, 0.1), (2, 0.02)])
def test_named_within_20_long_steps_five_of_five_and_nobody_in_1000_healthy_ones(
    train: Callable[..., list], size: int, step_s: float
) -> None:
    command = (str(Path(__file__).with_name("straggling.py")), str(step_s))
    ended = train(size=size, command=command, environ={"NODE_RANK": "3"})
    assert [(one.code, one.err) for one in ended] == [(0, "")] * size
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


def step_of(line: str) -> int:
    return int(line.partition(":")[0].removeprefix("step "))


def without_numbers(line: str) -> str:
    return re.sub(r"[\d.]+ times", "N times", line.replace(f"step {step_of(line)}:", "step N:")).replace(HOST, "HOST")
