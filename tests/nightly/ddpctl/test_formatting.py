"""How an array and a narrow terminal are shown."""

import sys
from dataclasses import replace
from io import StringIO

import pytest
from tests.unit.ddpctl.test_formatting import NODE, RUN

from ddpctl.commands import formatting
from ddpctl.runs.run_status import NodeReport, Progress, RunStatus
from ddpctl.text import EscapeFilter
from ddpwire.run_files import Outcome


def test_status_of_an_array_has_a_line_for_each_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPCTL_STATE_DIR", "/runs")
    job = replace(RUN.job, env={"LR": "1"})
    array = replace(RUN, job=job)
    tasks = [
        replace(
            array,
            name=f"night.task-{task}",
            job=replace(job, env={**job.env, "SLURM_ARRAY_TASK_ID": task}),
            checkpoint_dir=f"/runs/night/task-{task}/checkpoints",
        )
        for task in ("0", "12")
    ]
    saved = Outcome(code=143, cause="stopped", message="", step=40)
    states = (
        RunStatus(run="night.task-0", state="stopped", message="", code=143, outcome=saved),
        RunStatus(run="night.task-12", state="training", message=""),
    )
    state = RunStatus(run="night", state="training", message="array of 2", tasks=states)
    assert formatting.status_lines(array, state, tasks)[2:] == [
        "  logs         /runs/night",
        "  TASK  STATE     EXIT  STEP  PROGRAM                          CHECKPOINTS",
        "  0     stopped   143   40    SLURM_ARRAY_TASK_ID=0 train.py   /runs/night/task-0/checkpoints",
        "  12    training  -     -     SLURM_ARRAY_TASK_ID=12 train.py  /runs/night/task-12/checkpoints",
        "  one task     ddpctl status night --task K; logs, explain, profile, top, timeline, report take it, too",
    ]
    document = formatting.as_json(array, state, tasks)["tasks"]
    assert [(task["run"], task["state"], task["env"]["SLURM_ARRAY_TASK_ID"]) for task in document] == [
        ("night.task-0", "stopped", "0"),
        ("night.task-12", "training", "12"),
    ]


def test_the_step_the_loss_and_the_time_left_stay_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Progress(step=1200, planned=6000, epoch=3, loss=0.1234, steps_per_s=12.5, checkpoint_step=1000)
    report = NodeReport(node=0, alive=True, state=NODE, outcome=None, progress=at)
    state = RunStatus(run="night", state="training", message="1 of 1 node alive", nodes=(report,))
    every = "step 1200 of 6000, loss 0.1234, 6:24 left, epoch 3, 12.5 steps/s, last checkpoint at step 1000"
    assert formatting.status_lines(RUN, state)[2] == f"  progress     {every}"
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    line = formatting.status_lines(RUN, state)[2]
    assert (len(line), line[-3:]) == (80, "...")
    assert "step 1200 of 6000, loss 0.1234, 6:24 left, epoch 3" in line
    long = replace(RUN, name="a-training-with-a-name-of-40-characters-x")
    row = formatting.fit(formatting.runs_table([(long, state)], long.created)[1])
    assert len(row) <= 80
    assert row.startswith("a-training-with-a...  training  -     1200/6000, loss 0.1234, 6:24 left")


def test_checkpoints_on_other_machines_are_only_known_if_the_run_has_reported_one() -> None:
    run = replace(RUN, checkpoint_dir="box1:~/.ddpctl/runs/night/checkpoints", handle={"logs": "box1:~/.ddpctl"})
    for step, ending in ((None, ", if it has saved a checkpoint"), (40, "")):
        at = Progress(step=50, checkpoint_step=step)
        report = NodeReport(node=0, alive=True, state=NODE, outcome=None, progress=at)
        state = RunStatus(run="night", state="training", message="", nodes=(report,))
        assert f"  checkpoints  {run.checkpoint_dir}{ending}" in formatting.status_lines(run, state)


def test_what_looks_like_a_sequence_is_not_kept_for_ever() -> None:
    keep = EscapeFilter()
    assert keep(b"\x1b]52;" + b"x" * 5000).endswith(b"x" * 5000)
