"""The verbs of the target slurm: their command lines, and what they make of the answers."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_slurm_target import NONE, RUN, log_files, submit

from ddpctl.errors import ConfigError, NoInputError
from ddpctl.targets import LogQuery
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget


def test_a_job_after_a_run_that_has_no_record_is_refused() -> None:
    with pytest.raises(NoInputError, match=r"'day'.*/r/day/run\.json"):
        submit({"cat /r/day/run.json": NONE}, options=SlurmOptions(after="day"))


def test_logs_with_timestamps_are_those_of_every_rank() -> None:
    timed = log_files(LogQuery(ranks=(3,), timestamps=True))
    assert timed == ("7", "+1", "", "/r/night/node-1/timed/rank-3.log", "", "/r/night/node-1/timed/rank-3.1.log")
    every = log_files(LogQuery(timestamps=True, tail=5))
    assert [path.removeprefix("/r/night/") for path in every[3::2]] == [
        f"node-{node}/timed/{name}.log"
        for node in (0, 1)
        for name in ("ddprun", f"rank-{2 * node}", f"rank-{2 * node + 1}")
    ]


def test_logs_of_an_array_are_those_of_its_tasks() -> None:
    array = replace(RUN, handle=RUN.handle | {"tasks": ["4"]})
    with pytest.raises(ConfigError):
        log_files(LogQuery(timestamps=True), array)
    assert log_files(LogQuery(), array) == ("7", "+1", "[task 4] ", "/r/night/job-4.log")
    (task,) = SlurmTarget(SlurmOptions()).tasks(array)
    assert log_files(LogQuery(), task) == ("7_4", "+1", "", "/r/night/job-4.log")
    assert log_files(LogQuery(ranks=(1,)), task) == ("7_4", "+1", "[node0 rank1] ", "/r/night/task-4/node-0/rank-1.log")
