"""The records of runs."""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import ddpctl
from tests.unit.ddpctl.test_run_store import make

from ddpctl.errors import ConfigError, NoInputError, UsageError
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.operations.launcher import open_context
from ddpctl.runs import run_store


def test_a_record_of_an_older_version_has_no_id(tmp_path: Path) -> None:
    run = make(tmp_path, "digits-otter", 1.0)
    path = tmp_path / "digits-otter/run.json"
    record = json.loads(path.read_text())
    del record["uid"], record["user"]
    path.write_text(json.dumps(record))
    assert run_store.load(tmp_path, None) == replace(run, uid="", user="")


def test_a_folder_that_was_moved_is_where_it_is_now(tmp_path: Path) -> None:
    run = make(tmp_path / "a", "digits-otter", 1.0)
    (tmp_path / "a").rename(tmp_path / "b")
    assert run_store.load(tmp_path / "b", None) == replace(run, folder=str(tmp_path / "b/digits-otter"))


def test_names_are_new(tmp_path: Path) -> None:
    request = Request(job=JobSpec(name="digits"), target="local", kind="local", options=None)
    made = {run_store.choose_name(tmp_path, request)[0] for _ in range(50)}
    assert all(name.startswith("digits-") for name in made)
    assert len(made) > 10
    for word in run_store.WORDS:
        (tmp_path / f"digits-{word}").mkdir()
    assert not (tmp_path / run_store.choose_name(tmp_path, request)[0]).exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("created", float("nan")),
        ("created", float("inf")),
        ("created", "x"),
        ("handle", None),
        ("options", []),
        ("checkpoint_dir", "/a\0b"),
        ("job", {"env": None}),
        ("job", {"grace": "x"}),
    ],
    ids=["nan", "inf", "text-for-a-number", "no-handle", "options-list", "nul", "no-env", "grace"],
)
def test_a_record_of_another_kind_is_no_run_and_is_named(tmp_path: Path, key: str, value: object) -> None:
    whole = make(tmp_path, "digits-oak", 1.0)
    make(tmp_path, "digits-otter", 2.0)
    path = tmp_path / "digits-otter" / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, key: {**record[key], **value} if isinstance(value, dict) else value}))
    assert run_store.load_all(tmp_path) == (whole,)
    assert run_store.unreadable(tmp_path, run_store.load_all(tmp_path)) == (path.parent,)
    with pytest.raises(NoInputError) as error:
        run_store.load(tmp_path, "digits-otter")
    assert str(path) in str(error.value)


def test_a_record_that_is_a_fifo_keeps_nobody_waiting(tmp_path: Path) -> None:
    make(tmp_path, "digits-otter", 1.0)
    (tmp_path / "digits-otter" / "run.json").unlink()
    os.mkfifo(tmp_path / "digits-otter" / "run.json")
    assert run_store.load_all(tmp_path) == ()


def test_options_of_another_kind_are_named_and_keep_nobody_from_the_other_runs(tmp_path: Path) -> None:
    odd = replace(make(tmp_path, "odd", 1.0), options={"python": 5})
    context = open_context({"DDPCTL_STATE_DIR": str(tmp_path)})
    (state,) = launcher.status(context, (odd,))
    assert state.state == "unknown"
    assert ("'odd'" in state.message, "'python' is 5" in state.message) == (True, True)
    with pytest.raises(ConfigError) as error:
        launcher.target_of(odd)
    assert str(error.value) == state.message


def test_where_a_runs_checkpoints_are_on_this_machine(tmp_path: Path) -> None:
    here = make(tmp_path, "here", 1.0)
    assert run_store.checkpoints_here(here) == Path(here.checkpoint_dir)
    logs = {"logs": "elsewhere"}
    shared = replace(here, handle=logs)
    assert run_store.checkpoints_here(shared) is None  # its folder here is empty
    fetched = replace(here, handle=logs, checkpoint_dir="ann/ddpctl-here:runs/here/checkpoints")
    assert run_store.checkpoints_here(fetched) is None
    for kind in ("kaggle", "slurm"):
        run_store.save(replace(fetched, kind=kind, job=replace(fetched.job, command=())))
        refused = ddpctl("export", "here", DDPCTL_STATE_DIR=str(tmp_path))
        assert (refused.returncode, refused.stdout) == (66, "")
        assert fetched.checkpoint_dir in refused.stderr
    for name in ("first", "here"):
        folder = Path(here.folder, run_store.PULLED, "runs", name, "checkpoints")
        folder.mkdir(parents=True)
        (folder / "step-00000001.pt").touch()
        assert run_store.checkpoints_here(fetched) == folder  # that of the run that it resumed, or its own
    Path(here.checkpoint_dir).mkdir(parents=True, exist_ok=True)
    Path(here.checkpoint_dir, "step-00000002.pt").touch()
    assert run_store.checkpoints_here(shared) == Path(here.checkpoint_dir)


def test_the_name_of_a_launch_that_was_killed_before_its_record_is_free_again(tmp_path: Path) -> None:
    for name, files in {"torn": ("launch.lock", ".run.json.x7"), "young": (), "own": ("notes.txt",)}.items():
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        for file in files:
            (tmp_path / name / file).write_text("4 vm\n")
        if name != "young":
            os.utime(tmp_path / name, (1, 1))
    run_store.check_free(tmp_path, "torn")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "young"]
    for name in ("own", "young"):
        with pytest.raises(UsageError):
            run_store.check_free(tmp_path, name)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"job": ' * 100_000])
def test_a_record_that_is_nested_too_deeply_is_passed_over(tmp_path: Path, text: str) -> None:
    make(tmp_path, "good", 1.0)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/run.json").write_text(text)
    assert [run.name for run in run_store.load_all(tmp_path)] == ["good"]
    assert [path.name for path in run_store.unreadable(tmp_path, run_store.load_all(tmp_path))] == ["deep"]


def test_a_record_that_is_too_large_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    with (tmp_path / "large/run.json").open("wb") as file:
        file.truncate(1 << 32)
    assert [path.name for path in run_store.unreadable(tmp_path, run_store.load_all(tmp_path))] == ["large"]


def test_a_state_folder_that_takes_nothing_more_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk, without one
    try:
        done = ddpctl("launch", "--name", "night", "train.py", cwd=tmp_path, DDPCTL_STATE_DIR=str(tmp_path / "runs"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 73
    assert done.stderr == f"ddpctl: cannot write {tmp_path}/runs/night/launch.lock: File too large\n"
    assert not (tmp_path / "runs/night").exists()
