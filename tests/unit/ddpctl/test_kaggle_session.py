"""What ddpctl and ddprun read of a Kaggle session, with folders of the test in its place."""

import json
import os
from pathlib import Path

import pytest
from tests.unit.ddpctl.records import run_of

from ddpctl.execution.executor import Executor
from ddpctl.job.spec import JobSpec
from ddpctl.notebook import session
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddprun.settings import node_config
from ddprun.settings.node_config import Deadline
from ddpwire import kaggle

ON_KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch"}


def test_a_session_is_recognised_by_kaggles_own_variable_and_keeps_its_runs_in_the_working_folder() -> None:
    assert kaggle.session({}) is None
    session_ = kaggle.session(ON_KAGGLE)
    assert session_ == kaggle.Session(input=Path("/kaggle/input"), working=Path("/kaggle/working"), batch=True)
    other = kaggle.session(
        {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "DDP_KAGGLE_INPUT": "/i", "DDP_KAGGLE_WORKING": "/w"}
    )
    assert other == kaggle.Session(input=Path("/i"), working=Path("/w"), batch=False)
    assert run_store.state_dir({**ON_KAGGLE, "HOME": "/root"}) == Path("/kaggle/working/runs")
    assert run_store.state_dir({**ON_KAGGLE, "DDPCTL_STATE_DIR": "/elsewhere"}) == Path("/elsewhere")


def test_the_session_ends_twelve_hours_after_its_container_began(tmp_path: Path) -> None:
    assert kaggle.ends_at(ON_KAGGLE, started=1000.0) == 1000 + 12 * 3600
    assert kaggle.ends_at({**ON_KAGGLE, "DDP_KAGGLE_SESSION_S": "3600"}, started=1000.0) == 4600
    assert kaggle.ends_at({**ON_KAGGLE, "DDP_KAGGLE_SESSION_S": "999999"}, started=0.0) == 12 * 3600
    assert kaggle.ends_at({**ON_KAGGLE, "DDP_KAGGLE_STARTED": "2000"}, started=1000.0) == 2000 + 12 * 3600
    assert kaggle.ends_at(ON_KAGGLE, started=None) is None
    assert kaggle.ends_at({}, started=1000.0) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "stat").write_text("cpu 1 2\nbtime 1700000000\n")
    ticks = 50 * os.sysconf("SC_CLK_TCK")
    (tmp_path / "1" / "stat").write_text(f"1 (a ) b) S 0 {' '.join('0' * 17)} {ticks} 0 0\n")
    assert kaggle.container_start(tmp_path) == 1700000050
    assert kaggle.container_start(tmp_path / "1") is None


def test_the_end_of_the_session_is_the_deadline_of_ddprun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kaggle, "container_start", lambda: 1000.0)
    expected = Deadline(source="the Kaggle session's end", at=1000 + 12 * 3600, margin_s=600)
    assert node_config.read_deadline(None, ON_KAGGLE, grace_s=30, now=0.0) == expected
    assert node_config.read_deadline("7200", ON_KAGGLE, grace_s=30, now=0.0) == Deadline(source="--deadline", at=7200)
    assert node_config.read_deadline(None, {}, grace_s=30, now=0.0) is None


def write_run(
    folder: Path,
    *,
    created: float,
    checkpoint_dir: str,
    steps: tuple[int, ...] = (),
    command: tuple[str, ...] = (),
    cwd: str = "/",
) -> None:
    (folder / "checkpoints").mkdir(parents=True)
    for step in steps:
        (folder / "checkpoints" / f"step-{step:08}.pt").write_text(f"step {step} of {folder.name}")
    place = {"cwd": cwd, "folder": str(folder), "checkpoint_dir": checkpoint_dir}
    run_store.save(run_of(folder.name, created=created, job=JobSpec(command=command), **place))


def test_a_former_versions_run_is_brought_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, root = tmp_path / "input", tmp_path / "working" / "runs"
    context = AppContext(executor=Executor({}), root=root, emit=print)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    monkeypatch.setenv("DDP_KAGGLE_INPUT", str(top))
    assert session._newest(context, session.program_of("ddptrain")) is None
    write_run(top / "other/runs/old", created=1.0, checkpoint_dir="/kaggle/working/runs/old/checkpoints", steps=(99,))
    former = top / "notebooks/ann/ddpctl-night-2/runs"
    write_run(former / "night", created=2.0, checkpoint_dir="/kaggle/working/runs/night/checkpoints", steps=(5, 10))
    write_run(former / "night-2", created=3.0, checkpoint_dir="/kaggle/working/runs/night/checkpoints")
    write_run(former / "mine", created=4.0, checkpoint_dir="/w/mine/checkpoints", command=("mine.py",))
    for path in [top, *top.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)  # as an input is
    run = session._newest(context, session.program_of("ddptrain"))
    for path in [top, *top.rglob("*")]:
        path.chmod(0o755)
    assert run is not None
    assert (run.name, run.checkpoint_dir) == ("night-2", str(root / "night" / "checkpoints"))
    names = sorted(path.name for path in (root / "night" / "checkpoints").iterdir())
    assert names == ["step-00000005.pt", "step-00000010.pt"]
    record = json.loads((root / "night-2" / "run.json").read_text())
    assert (record["created"], record["checkpoint_dir"]) == (3.0, run.checkpoint_dir)
    (root / "night" / "checkpoints" / "more").write_text("it can be written")
    write_run(root / "again", created=5.0, checkpoint_dir=run.checkpoint_dir, cwd=str(Path.cwd()))
    later = session._newest(context, session.program_of("ddptrain"))
    assert later is not None
    assert later.name == "again"  # this session's own, which is newer
