"""What Slurm and the nodes' files say of a run, as a state of ours."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from tests.unit.ddpctl.test_slurm_target import RUN, play
from tests.wording import Wording

from ddpctl.command import Output
from ddpctl.run_status import RunStatus, State
from ddpctl.run_store import Run
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.queue import STATES, Job, read_answers
from ddpctl.targets.slurm.target import SlurmTarget, expand

DATA = Path(__file__).parents[2] / "data" / "slurm"


def status(text: str, *, run: Run = RUN, now: float = 5000.0) -> RunStatus:
    (asked,), (found,) = play(
        SlurmTarget(SlurmOptions()).status((run,), now=now), [(Output(returncode=0, stdout=text),)]
    )
    assert asked.argv[:5] == ("sh", "-c", queue.ASK, "ddpctl", run.handle["job"])
    return found


def said(squeue: str, *files: tuple[str, str]) -> str:
    return f"==> squeue <==\n{squeue}\n" + "".join(f"==> /r/night/{path} <==\n{text}\n\n" for path, text in files)


NODE = '{"run": "night", "node": 0, "pid": 3, "state": "training", "started": 1.0, "metrics": "http://n0:1/metrics"}'
SAVED = '{"code": 143, "cause": "stopped", "message": "stopped by SIGTERM", "retry": true, "step": 40}'


@pytest.mark.parametrize(
    ("text", "state", "code"),
    [
        (said("7|N/A|PENDING|Resources|2026-11-20T14:00:00|"), "pending", None),
        (said("7|N/A|PENDING|PartitionNodeLimit|N/A|"), "pending", None),
        (said("7|N/A|PENDING|ReqNodeNotAvail, UnavailableNodes:node-2|N/A|"), "pending", None),
        (said("7|N/A|PENDING|BeginTime|N/A|", ("node-0/outcome.json", SAVED)), "pending", None),
        (said("7|N/A|RUNNING|None|2026-11-20T13:00:00|n[0-1]"), "starting", None),
        (said("7|N/A|RUNNING|None|x|n[0-1]", ("node-0/node.json", NODE), ("node-1/node.json", NODE)), "running", None),
        (said("7|N/A|COMPLETING|None|x|n[0-1]", ("node-0/outcome.json", SAVED), ("node-1/outcome.json", SAVED)),
         "stopping", None),
        (said("7|N/A|FAILED|NonZeroExitCode|x|n[0-1]", ("node-0/outcome.json", SAVED)), "stopped", 143),
        (said("7|N/A|NODE_FAIL|None|x|n[0-1]", ("node-0/node.json", NODE)), "failed", 137),
        (said("7|N/A|CANCELLED|None|x|"), "stopped", 143),
        (said("7|N/A|NEW_STATE|None|x|"), "unknown", None),
        (said("", ("node-1/outcome.json", SAVED)), "stopped", 143),
        (said(""), "lost", 137),
        (said("error: slurm_load_jobs error: Unable to contact slurm controller"), "unknown", None),
    ],
    ids=["Resources", "PartitionNodeLimit", "ReqNodeNotAvail", "requeued", "starting", "training", "COMPLETING",
         "FAILED", "NODE_FAIL", "CANCELLED", "NEW_STATE", "outcome-alone", "nothing", "no-controller"],
)  # fmt: skip
def test_the_state_of_a_job(text: str, state: str, code: int | None, wording: Wording) -> None:
    found = status(text)
    assert (found.state, found.code) == (state, code)
    wording(found.message)


def test_a_job_that_never_started_has_no_log() -> None:
    cancelled = "7|N/A|CANCELLED|None|x|"
    assert not status(said(cancelled)).has_logs
    assert status(said(cancelled, ("starts", "slurm 7 0 20 900\n"))).has_logs


def test_who_follows_a_job_reads_why_it_waits(tmp_path: Path, wording: Wording) -> None:
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
    wording(done.stderr)


@pytest.mark.parametrize(
    ("starts", "outcome"),
    [("slurm 7 0 20 900\n", SAVED), ("slurm 7 0 2 900\nslurm 7 1 2 950\n", ""), ("slurm 7 2 2 900\n", ""), ("", "")],
    ids=["saved", "killed", "by-an-administrator", "never-started"],
)
def test_a_job_that_waits_again_says_where_it_was(starts: str, outcome: str, wording: Wording) -> None:
    found = status(said("7|N/A|PENDING|BeginTime|N/A|", ("starts", starts), ("node-0/outcome.json", outcome)))
    assert found.state == "pending"
    wording(found.message)


def test_a_job_that_was_killed_says_the_last_step_of_its_nodes_history(wording: Wording) -> None:
    starts = ("starts", "slurm 7 0 20 900\n")
    history = ("node-0/history.csv", "time,ddp_last_step\n940,7\n950,9\n")
    wording(status(said("7|N/A|PENDING|BeginTime|N/A|", starts, history)).message)
    going = status(said("7|N/A|RUNNING|None|x|n[0-1]", starts, ("node-0/node.json", NODE), history))
    assert going.progress is not None
    assert (going.progress.step, going.progress.steps_per_s) == (9, 0.2)


def test_the_state_of_an_array(wording: Wording) -> None:
    run = replace(RUN, handle=RUN.handle | {"tasks": ["0", "1"]})
    going = status(said("7|0|RUNNING|None|x|n0\n7|1|PENDING|JobArrayTaskLimit|N/A|"), run=run)
    assert going.state == "starting"
    wording(going.message)
    done = '{"code": 0, "cause": "ok", "message": "every rank exited with 0"}'
    failed = '{"code": 3, "cause": "error", "message": "rank 0 exited with 3", "rank": 0}'
    files = (("task-0/node-0/outcome.json", done), ("task-1/node-0/outcome.json", failed))
    ended = status(said("7|0|COMPLETED|None|x|\n7|1|FAILED|NonZeroExitCode|x|", *files), run=run)
    assert (ended.state, ended.code) == ("failed", 3)
    assert [(one.run, one.state, one.code) for one in ended.tasks] == [
        ("night.task-0", "succeeded", 0),
        ("night.task-1", "failed", 3),
    ]
    (task,) = SlurmTarget(SlurmOptions()).tasks(run)[1:]
    one = status(said("7|0|COMPLETED|None|x|\n7|1|FAILED|NonZeroExitCode|x|", *files), run=task)
    assert (one.run, one.state, one.code, one.tasks) == ("night.task-1", "failed", 3, ())
    wording(ended.message)
    assert expand("0-6:3,9%2") == ("0", "3", "6", "9")


def test_recorded_answers() -> None:
    """From the lab's Slurm 22.05: an array at work, a job that waits for it, and one that was never there."""
    answers = read_answers((DATA / "ask-22.05.txt").read_text())
    assert [(job.id, job.task, job.state, job.reason) for job in answers.jobs] == [
        ("1", "2", "succeeded", "None"),
        ("1", "4", "pending", "JobArrayTaskLimit"),
        ("1", "3", "running", "None"),
        ("4", None, "pending", "Resources"),
    ]
    assert [Path(path).name for path in answers.files] == ["node.json", "outcome.json"]


def test_every_slurm_state_is_one_of_ours() -> None:
    assert set(STATES.values()) <= set(get_args(State))
    jobs = [Job(id="7", task=None, word=word) for word in ("CANCELLED by 1000", "CANCELLED+", "NEW")]
    assert [job.state for job in jobs] == ["stopped", "stopped", "unknown"]
