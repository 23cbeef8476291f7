"""What ps, status and rm cost with many runs: processes, files and sessions on hosts, whatever the time."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import ddpctl

from ddpctl.command import UNREACHED, Command, Output
from ddpctl.execution.remote import Remote
from ddpctl.job.spec import JobSpec
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run
from ddpwire import history
from ddpwire.run_files import Outcome

counting: list[Counter[str]] = []
OPENED = 20  # files a run, at the most
sys.addaudithook(lambda event, _: counting[-1].update((event,)) if counting else None)


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of rm needs find, du and rm."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def make_runs(root: Path, count: int) -> None:
    for number in range(count):
        folder = run_store.create(root, f"run-{number}")
        (folder / "checkpoints/step-00000010.pt").write_bytes(b"x" * 10_000)
        for node in (folder / "node-0", folder / "node-1"):
            node.mkdir()
            (node / "ddprun.lock").touch()
            Outcome(code=0, cause="ok", message="every rank exited with 0").write(node)
        run_store.save(
            Run(
                name=folder.name, created=1000.0 + number, target="local", kind="local", options={},
                job=JobSpec(nodes="2", gpus=1, command=("train.py",)), cwd=str(root), folder=str(folder),
                checkpoint_dir=str(folder / "checkpoints"), version="0.1.0", handle={"port": "1"},
            )
        )  # fmt: skip


def cost(*arguments: str, root: Path) -> Counter[str]:
    counting.append(Counter())
    try:
        done = ddpctl(*arguments, DDPCTL_STATE_DIR=str(root))
        assert done.returncode == 0, done.stderr
    finally:
        runs = counting.pop()
    return runs


@pytest.mark.parametrize("verb", ["ps --last 0", "status run-7", "rm --older-than 0s --dry-run", "rm --older-than 0s"])
def test_ps_of_many_runs_starts_one_process_and_opens_a_few_files_a_run(verb: str, tmp_path: Path) -> None:
    costs = []
    for count in (10, 20, 60):
        root = tmp_path / str(count)
        make_runs(root, count)
        costs.append(cost(*verb.split(), root=root))
        assert any(root.iterdir()) == (verb != "rm --older-than 0s")
    _, few, many = costs  # the first imports what the verb needs
    scripts = verb.startswith("rm") + (verb == "rm --older-than 0s")  # the folders are measured, and then removed
    assert (few["subprocess.Popen"], many["subprocess.Popen"]) == (1 + scripts, 1 + scripts), "nodectl"
    assert many["open"] - few["open"] <= (OPENED if verb.startswith("status") else 40 * OPENED)


@pytest.mark.parametrize("count", [2, 40])
def test_a_host_has_one_session_for_all_runs(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host is a shell of this machine with a home folder of its own."""
    sessions: Counter[str] = Counter()

    def session(_: Remote, command: Command) -> Output:
        sessions[str(command.host)] += 1
        environ = {"HOME": str(tmp_path / str(command.host)), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command.argv, input=command.stdin, env=environ, capture_output=True, text=True, timeout=90
        )
        return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    monkeypatch.setattr(Remote, "prepare", lambda *_: None)
    monkeypatch.setattr(Remote, "capture", session)
    root, hosts = tmp_path / "runs", ("box1", "box2")
    options = {"hosts": [{"address": host} for host in hosts], "runtime": "none"}
    make_runs(root, count)
    for run in run_store.load_all(root):
        run_store.save(replace(run, kind="ssh", options=options, handle={"hosts": [0, 1], "logs": "there"}))
        for node in range(2):
            shutil.rmtree(Path(run.folder) / f"node-{node}")
            (tmp_path / hosts[node] / f".ddpctl/runs/{run.name}/node-{node}").mkdir(parents=True)
    outcome = Outcome(code=0, cause="ok", message="every rank exited with 0")
    outcome.write(tmp_path / "box2/.ddpctl/runs/run-1/node-1")

    shown = json.loads(ddpctl("ps", "--last", "0", "--json", DDPCTL_STATE_DIR=str(root)).stdout)
    assert sessions == dict.fromkeys(hosts, 1)
    assert {line["run"]: line["state"] for line in shown} == {
        f"run-{number}": "succeeded" if number == 1 else "lost" for number in range(count)
    }
    sessions.clear()
    done = ddpctl("rm", "--older-than", "0s", DDPCTL_STATE_DIR=str(root))
    assert done.returncode == 0, done.stderr
    assert sessions == dict.fromkeys(hosts, 3), "the states, what the runs have left, and its removal"
    assert done.stdout.count("is removed") == count
    assert not any(root.iterdir())
    assert not [path for host in hosts for path in tmp_path.glob(f"{host}/.ddpctl/runs/*")]


def test_a_run_whose_host_is_gone_is_kept_and_its_record_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(_: Remote, command: Command) -> Output:
        if str(command.host) == "box9":
            return Output(returncode=UNREACHED, stderr="no route to host")
        environ = {"HOME": str(tmp_path / "box1"), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            command.argv, input=command.stdin, env=environ, capture_output=True, text=True, timeout=90
        )
        return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    monkeypatch.setattr(Remote, "prepare", lambda *_: None)
    monkeypatch.setattr(Remote, "capture", session)
    root, node = tmp_path / "runs", tmp_path / "box1/.ddpctl/runs/run-0/node-0"
    options = {"hosts": [{"address": "box1"}, {"address": "box9"}], "runtime": "none"}
    make_runs(root, 1)
    run = run_store.load(root, "run-0")
    for number in range(2):
        shutil.rmtree(Path(run.folder) / f"node-{number}")
    run_store.save(replace(run, kind="ssh", options=options, handle={"hosts": [0, 1], "logs": "there"}))
    node.mkdir(parents=True)
    Outcome(code=1, cause="node_lost", message="node 1 was lost").write(node)
    refused = ddpctl("rm", "run-0", DDPCTL_STATE_DIR=str(root))
    assert (refused.returncode, refused.stdout) == (69, "")
    assert "box9" in refused.stderr
    assert run.folder in refused.stderr
    assert node.is_dir()


def test_a_run_that_others_resumed_is_kept_for_them(tmp_path: Path) -> None:
    make_runs(tmp_path, 3)
    run = run_store.load(tmp_path, "run-0")
    for name in ("run-1", "run-2"):
        run_store.save(replace(run_store.load(tmp_path, name), checkpoint_dir=run.checkpoint_dir))
    refused = ddpctl("rm", "run-0", "run-1", DDPCTL_STATE_DIR=str(tmp_path))
    assert refused.returncode == 2
    assert refused.stderr.count("ddpctl rm run-0 run-2") == 1
    assert ddpctl("rm", "run-0", "run-1", "run-2", DDPCTL_STATE_DIR=str(tmp_path)).returncode == 0
    assert not any(tmp_path.iterdir())


def test_top_of_a_run_that_has_ended_tells_its_restarts(tmp_path: Path) -> None:
    make_runs(tmp_path, 1)
    for node, lost in ((0, 7), (1, 3)):
        counted = {"ddp_restarts_total:node_lost": 2.0, "ddp_restarts_total:oom": 1.0, "ddp_steps_lost_total": lost}
        rows = [{"ddp_last_step": 1.0}, {"ddp_last_step": 40.0, **counted}]
        lines = [history.HEADER, *(history.line(1000.0 + at, row) for at, row in enumerate(rows))]
        (tmp_path / f"run-0/node-{node}/history.csv").write_text("\n".join(lines) + "\n")
    seen = json.loads(ddpctl("top", "--once", "--json", DDPCTL_STATE_DIR=str(tmp_path)).stdout)
    assert (seen["step"], seen["restarts"], seen["steps_lost"]) == (40, 3, 7)
