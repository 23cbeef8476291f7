"""Runs that no ddpctl launched, found by what is in their folders."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import ddpctl, verbs
from tests.unit.ddpctl.test_run_store import node, runs_in

from ddpctl.commands.arguments import run_arguments
from ddpctl.commands.formatting import TAKE_TASK
from ddpctl.operations import run_folders
from ddpctl.runs import run_store
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget
from ddpwire.run_files import Outcome


def test_a_batch_script_says_which_job_it_is_also_of_an_array(tmp_path: Path) -> None:
    node(tmp_path / "digits-7")
    (tmp_path / "digits-7" / "starts").write_text("slurm 7 0 20 30\ntorn\nslurm 7 1 20 60\n")
    for task in (0, 3):
        node(tmp_path / "digits-8" / f"task-{task}")
        (tmp_path / "digits-8" / f"task-{task}" / "starts").write_text("slurm 8 0 20 70\n")
    single, array = (runs_in(tmp_path)[name] for name in ("digits-7", "digits-8"))
    assert (single.kind, single.created, single.handle["job"], single.handle["dir"]) == (
        "slurm",
        30.0,
        "7",
        single.folder,
    )
    assert (array.handle["job"], array.handle["tasks"], array.job.nodes) == ("8", ["0", "3"], "1")
    (_, task) = SlurmTarget(SlurmOptions()).tasks(array)
    assert run_arguments(task) == run_arguments(array, "3") == f"{tmp_path / 'digits-8'} --task 3"


def test_a_record_of_ddpctl_is_taken_as_it_is(tmp_path: Path) -> None:
    node(tmp_path / "a")
    (own,) = run_folders.load_all(tmp_path / "a")
    run_store.save(replace(own, handle={"port": "1"}, target="here"))
    launched = runs_in(tmp_path)["a"]
    assert (launched.target, run_folders.is_by_hand(launched)) == ("here", False)


def test_every_verb_that_takes_a_task_or_a_folder_is_listed(tmp_path: Path) -> None:
    with_task = {verb.name for verb in verbs().values() if any(parameter.name == "task" for parameter in verb.params)}
    assert {"status", *TAKE_TASK.split(", ")} == with_task
    (tmp_path / "runs").mkdir()
    refused = ddpctl("attach", "runs/a", cwd=tmp_path)
    assert refused.returncode == 66
    assert all(re.search(rf"\b{verb}\b", refused.stderr) for verb in (*with_task, "export")), refused.stderr


def test_stop_says_how_to_stop_the_run_of_a_folder(tmp_path: Path) -> None:
    for name in ("longer-25", "by-ddprun", "launched"):
        node(tmp_path / "runs" / name)
    (tmp_path / "runs/longer-25/starts").write_text("slurm 25 0 20 30\n")
    run_store.save(replace(runs_in(tmp_path / "runs")["launched"], handle={"port": "1"}))
    for name, state, way in (
        ("longer-25", "state", "scancel 25"),
        ("by-ddprun", "state", "SIGTERM"),
        ("launched", "state", f"DDPCTL_STATE_DIR={tmp_path}/runs ddpctl stop launched"),
        ("launched", "runs", " ddpctl stop launched"),
    ):
        refused = ddpctl("stop", f"runs/{name}", cwd=tmp_path, DDPCTL_STATE_DIR=str(tmp_path / state))
        assert (refused.returncode, way in refused.stderr) == (66, True)


def typed(text: str, cwd: Path, **env: str) -> list[str]:
    """Call each command of ddpctl that is printed in ``text``, and return these commands."""
    printed = re.findall(r"^  [a-z ]+  ddpctl (.*)$", text, re.MULTILINE)
    ended = [ddpctl(*shlex.split(arguments), cwd=cwd, **env) for arguments in printed]
    assert [rank.returncode for rank in ended] == [0] * len(ended), (printed, ended)
    return printed


def test_a_printed_command_finds_the_run_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = node(tmp_path / "my runs" / "failing-24", ranks=1)
    Outcome(code=3, cause="error", message="rank 0 exited with 3", rank=0, node=0).write(path)
    (path / "rank-0.log").write_text("hello\n")
    (path.parent / "checkpoints").mkdir()
    (path.parent / "checkpoints" / "step-00000001.pt").touch()
    env = {"DDPCTL_STATE_DIR": str(tmp_path / "state")}
    output = ddpctl("status", "my runs/failing-24", cwd=tmp_path, **env).stdout
    read = f"logs '{path.parent}' --rank 0"
    assert typed(output, tmp_path, **env) == [read], "launch --resume needs the record of a launch"
    (own,) = run_folders.load_all(path.parent)
    run_store.save(replace(own, handle={"port": "1"}))
    output = ddpctl("status", "my runs/failing-24", cwd=tmp_path, **env).stdout
    assert typed(output, tmp_path, **env) == [read], "the record is not among this user's runs"
    output = ddpctl("status", "failing-24", cwd=tmp_path, DDPCTL_STATE_DIR=str(tmp_path / "my runs")).stdout
    assert "ddpctl logs failing-24 --rank 0\n" in output
    assert "ddpctl launch --resume failing-24\n" in output


def test_the_verbs_take_a_folder_for_a_name(tmp_path: Path) -> None:
    path = node(tmp_path / "runs" / "a", ranks=1)
    Outcome(code=0, cause="ok", message="every rank exited with 0").write(path)
    (path / "rank-0.log").write_text("hello\n")
    env = {"DDPCTL_STATE_DIR": str(tmp_path / "state")}
    (listed,) = json.loads(ddpctl("ps", "--json", "--folder", "runs", cwd=tmp_path, **env).stdout)
    assert (listed["run"], listed["state"], listed["code"]) == ("a", "succeeded", 0)
    assert json.loads(ddpctl("status", "--json", "runs/a", cwd=tmp_path, **env).stdout) == listed
    assert json.loads(ddpctl("timeline", "--json", "runs/a", cwd=tmp_path, **env).stdout)["run"] == "a"
    refused = ddpctl("status", "runs/a", "--task", "1", cwd=tmp_path, **env)
    assert (refused.returncode, "--task" in refused.stderr) == (66, True)
    assert sorted(file.name for file in path.parent.iterdir()) == ["node-0"], "looking leaves nothing"
    assert ddpctl("rm", "runs/a", cwd=tmp_path, **env).returncode == 66, "only what ddpctl launched"
