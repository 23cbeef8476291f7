"""Whoever says when a run is ended from outside, its ranks are asked in time to save."""

import re
import time

import pytest
from tests.fixtures.nodes import until

from ddprun.settings import node_config
from ddprun.settings.node_config import Deadline
from ddprun.system.errors import NodeError

SLURM = {"SLURM_JOB_END_TIME": "1893456000"}


@pytest.mark.parametrize(
    ("flag", "environ", "expected"),
    [
        (None, {}, None),
        ("90", {}, Deadline(source="--deadline", at=1893450090)),
        ("2030-01-01T01:00:00+01:00", {}, Deadline(source="--deadline", at=1893456000)),
        (None, {"DDP_DEADLINE": "2030-01-01T00:00:00Z"}, Deadline(source="DDP_DEADLINE", at=1893456000)),
        (None, SLURM, Deadline(source="SLURM_JOB_END_TIME", at=1893456000, margin_s=30)),
        ("90", SLURM | {"DDP_DEADLINE": "80"}, Deadline(source="--deadline", at=1893450090)),
    ],
)
def test_the_deadline_is_that_of_the_flag_the_variable_or_slurm(
    flag: str | None, environ: dict[str, str], expected: Deadline | None
) -> None:
    assert node_config.read_deadline(flag, environ, grace_s=30, now=1893450000) == expected


@pytest.mark.parametrize(
    "text",
    [pytest.param("2029-12-31T23:59:00+00:00", id="over"), pytest.param("2030-01-01T00:00:20+00:00", id="too-soon")],
)
def test_a_deadline_that_is_too_early_to_save_is_refused(text: str) -> None:
    with pytest.raises(NodeError) as refused:
        node_config.read_deadline(text, {}, grace_s=30, now=1893456000)
    assert (refused.value.outcome.code, refused.value.outcome.cause) == (78, "config")
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("after_s", "stops_after_s", "left_s"),
    [pytest.param(-50.0, 0.0, 0, id="over"), pytest.param(6.4, 0.5, 6, id="time")],
)
def test_a_stop_is_requested_one_grace_before_the_deadline(after_s: float, stops_after_s: float, left_s: int) -> None:
    lines: list[str] = []
    stop_times: list[float] = []
    now = time.time()
    deadline = Deadline(source="--deadline", at=now + after_s)
    node_config.watch_deadline(
        deadline, grace_s=0.9, request_stop=lambda: stop_times.append(time.time()), log=lines.append
    )
    until(lambda: stop_times)
    assert stop_times[0] - now > stops_after_s - 0.01
    assert seconds_left(lines) <= left_s


def seconds_left(lines: list[str]) -> int:
    """The seconds in the one line about the deadline; on a busy machine it comes later."""
    (line,) = lines
    (seconds,) = re.findall(r"(\d+) s:", line)
    return int(seconds)
