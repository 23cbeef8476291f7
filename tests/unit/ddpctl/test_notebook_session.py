"""What a cell shows of its run's log, and which earlier run it continues from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.messages import refused
from tests.unit.ddpctl.records import run_of

from ddpctl.errors import UsageError
from ddpctl.execution.executor import Executor
from ddpctl.job.spec import JobSpec
from ddpctl.notebook import session
from ddpctl.notebook.session import Program, Tail
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store


def test_a_bar_reaches_the_cell_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "node.log"
    tail = Tail(log)
    tail.pass_on()
    for text in ("a line\n", "\r[node0 rank0]  45%|█", "\r[node0 rank0]  46%|█"):
        with log.open("a") as file:
            file.write(text)
        tail.pass_on()
        assert capsys.readouterr().out == text
    tail.end_line()
    tail.close()
    assert capsys.readouterr().out == "\n"


def write_run(root: Path, name: str, created: float, program: Program | None = None, **fields: Any) -> None:
    """A run of a function, or with a command in ``fields``."""
    handle = {session.FUNCTION: program.name, session.SOURCE: program.source} if program else {}
    command = fields.pop("command", ("train",))
    values = {"cwd": str(root), "folder": str(root / name), "handle": handle} | fields
    (root / name).mkdir()
    run_store.save(run_of(name, created=created, job=JobSpec(command=command), **values))


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppContext:
    monkeypatch.chdir(tmp_path)
    for name in ("JPY_SESSION_NAME", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return AppContext(executor=Executor({}), root=tmp_path, emit=print)


def test_a_run_whose_checkpoints_are_not_here_is_refused(context: AppContext, tmp_path: Path) -> None:
    write_run(tmp_path, "night", 1.0, kind="slurm")
    elsewhere = {"handle": {"logs": "hpc:/runs/night"}, "checkpoint_dir": "/runs/night/c"}
    run_store.save(replace(run_store.load(tmp_path, "night"), **elsewhere))
    with refused(UsageError, "resume='night'", "/runs/night/c"):
        session._resumed(context, "night", Program("train()", ""))


FIELDS: dict[str, Any] = {
    "gpus": 2,
    "ranks": None,
    "device": "cpu",
    "env": {},
    "max_restarts": None,
    "hang_timeout": None,
    "time_limit": None,
    "grace": 30.0,
}


def test_the_arguments_of_launch_become_a_job() -> None:
    job = session._job("train.py", ("--lr", 0.1), {}, {**FIELDS, "ranks": 1, "env": {"LR": "1"}, "time_limit": "2h"})
    assert job == JobSpec(
        name="train",
        command=("train.py", "--lr", "0.1"),
        gpus=2,
        ranks=1,
        device="cpu",
        env={"LR": "1"},
        time_limit="2h",
    )
