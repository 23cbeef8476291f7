"""What Slurm and the nodes' files say of a run, as a state of ours."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tests.unit.ddpctl.test_slurm_target import NODE, RUN, SAVED, answered, status

from ddpctl.runs.run_status import State
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.queue import STATES, Job
from ddpctl.targets.slurm.target import SlurmTarget, expand


def test_who_follows_a_job_reads_why_it_waits(tmp_path: Path) -> None:
    squeue = """#!/bin/sh
echo >>asked
case $(wc -l <asked) in
  1) echo 'PENDING|Resources|2026-11-20T14:00:00|' ;;
  2) echo 'PENDING|ReqNodeNotAvail, UnavailableNodes:node-2|2026-11-20T14:00:00|' ;;
  3) echo 'PENDING|BeginTime|N/A|' ;;
  *) echo 'COMPLETED|None|2026-11-20T14:00:00|' ;;
esac
"""
    (tmp_path / "squeue").write_text(squeue)
    (tmp_path / "squeue").chmod(0o755)
    argv = ["sh", "-c", queue.FOLLOW, "ddpctl", "7", "+1"]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
    first, second, third = done.stderr.splitlines()
    assert ("Resources" in first, "2026-11-20T14:00:00" in first) == (True, True)
    assert ("node-2" in second, "BeginTime" in third) == (True, True)


@pytest.mark.parametrize(
    ("starts", "outcome", "fact"),
    [
        ("slurm 7 0 20 900\n", SAVED, "step 40 (requeue 1 of 20)"),
        ("slurm 7 0 2 900\nslurm 7 1 2 950\n", "", "(requeue 2 of 2)"),
        ("slurm 7 2 2 900\n", "", "(requeue 3)"),
        ("", "", "job 7 "),
    ],
    ids=["saved", "killed", "by-an-administrator", "never-started"],
)
def test_a_job_that_waits_again_tells_its_step_and_its_requeues(starts: str, outcome: str, fact: str) -> None:
    state = status(answered("7|N/A|PENDING|BeginTime|N/A|", ("starts", starts), ("node-0/outcome.json", outcome)))
    assert (state.state, fact in state.message, "requeue" in state.message) == ("pending", True, bool(starts))


def test_a_job_that_was_killed_says_the_last_step_of_its_nodes_history() -> None:
    starts = ("starts", "slurm 7 0 20 900\n")
    history = ("node-0/history.csv", "time,ddp_last_step\n940,7\n950,9\n")
    assert "step 9 " in status(answered("7|N/A|PENDING|BeginTime|N/A|", starts, history)).message
    going = status(answered("7|N/A|RUNNING|None|x|n[0-1]", starts, ("node-0/node.json", NODE), history))
    assert going.progress is not None
    assert (going.progress.step, going.progress.steps_per_s) == (9, 0.2)


def test_every_slurm_state_is_one_of_ours() -> None:
    assert set(STATES.values()) <= set(get_args(State))
    jobs = [Job(id="7", task=None, word=word) for word in ("CANCELLED by 1000", "CANCELLED+", "NEW")]
    assert [job.state for job in jobs] == ["stopped", "stopped", "unknown"]


def test_the_state_of_an_array_is_that_of_its_tasks() -> None:
    run = replace(RUN, handle=RUN.handle | {"tasks": ["0", "1"]})
    going = status(answered("7|0|RUNNING|None|x|n0\n7|1|PENDING|JobArrayTaskLimit|N/A|"), run=run)
    assert going.state == "starting"
    assert [fact in going.message for fact in ("1 starting", "1 pending")] == [True, True]
    done = '{"code": 0, "cause": "ok", "message": "every rank exited with 0"}'
    failed = '{"code": 3, "cause": "error", "message": "rank 0 exited with 3", "rank": 0}'
    files = (("task-0/node-0/outcome.json", done), ("task-1/node-0/outcome.json", failed))
    ended = status(answered("7|0|COMPLETED|None|x|\n7|1|FAILED|NonZeroExitCode|x|", *files), run=run)
    assert (ended.state, ended.code) == ("failed", 3)
    assert [(state.run, state.state, state.code) for state in ended.tasks] == [
        ("night.task-0", "succeeded", 0),
        ("night.task-1", "failed", 3),
    ]
    (task,) = SlurmTarget(SlurmOptions()).tasks(run)[1:]
    state = status(answered("7|0|COMPLETED|None|x|\n7|1|FAILED|NonZeroExitCode|x|", *files), run=task)
    assert (state.run, state.state, state.code, state.tasks) == ("night.task-1", "failed", 3, ())
    facts = ("1 succeeded", "1 failed", "task 1: rank 0 exited with 3")
    assert [fact in ended.message for fact in facts] == [True] * 3
    assert expand("0-6:3,9%2") == ("0", "3", "6", "9")
