"""ddpctl rm on runs whose nodes have really run: what it removes, keeps and refuses."""

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.ddpctl.worlds import World
from tests.unit.ddpctl.records import run_of

from ddpctl.commands import explain
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.runs import run_store
from ddpwire.run_files import NodeState, Outcome

MONTH_S = 31 * 86400


def age(folder: Path) -> None:
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"created": record["created"] - MONTH_S}))


def kept(root: Path) -> list[str]:
    """The runs that are there; beside them is the folder of Prometheus' targets."""
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def test_ended_runs_are_removed_and_others_are_not(world: Callable[[str], World], tmp_path: Path) -> None:
    site = world("local")
    root = site.runs
    assert site.ddpctl("launch", "--name", "day", "--", "train.py", "steps=1").returncode == 0
    site.enter("training")
    both = site.ddpctl("rm", "day", "night")
    assert (both.returncode, both.stdout, kept(root)) == (2, "", ["day", "night"]), "all of them, or none"

    (root / "day/checkpoints/step-1.pt").write_bytes(b"x" * 2_000_000)
    (root / "day/checkpoints/outside").symlink_to(tmp_path)
    assert site.ddpctl("launch", "--resume", "day", "--name", "day-2").returncode == 0
    assert site.ddpctl("rm", "day").returncode == 2, "the other run has its checkpoints"
    dry = site.ddpctl("rm", "--dry-run", "day", "day-2")
    assert (dry.returncode, kept(root)) == (0, ["day", "day-2", "night"])
    assert re.search(r"2\.\d MB", dry.stdout)

    for name in ("day", "night"):
        age(root / name)
    old = site.ddpctl("rm", "--older-than", "30d")
    assert (old.returncode, old.stdout, kept(root)) == (0, "", ["day", "day-2", "night"])
    age(root / "day-2")
    assert site.ddpctl("rm", "--older-than", "30d").returncode == 0
    assert kept(root) == ["night"]
    assert site.ddpctl("stop", "night", "--kill").returncode == 0
    assert site.ddpctl("rm", "night").returncode == 0
    assert kept(root) == []
    assert site.folder.is_dir()


@pytest.mark.parametrize("arguments", [(), ("--older-than", "month")])
def test_runs_or_an_age_are_required(arguments: tuple[str, ...], world: Callable[[str], World]) -> None:
    assert world("local").ddpctl("rm", *arguments).returncode == 2


@pytest.mark.parametrize("arguments", [(), ("--timestamps",), ("--rank", "1"), ("--rank", "9")], ids=" ".join)
def test_a_job_that_has_not_started_has_no_log(arguments: tuple[str, ...], world: Callable[[str], World]) -> None:
    site = world("slurm")
    site.enter("pending")
    done = site.ddpctl("logs", "night", *arguments)
    assert (done.returncode, "pending" in done.stderr) == (66, "--rank" not in arguments)
    assert site.ddpctl("stop", "night").returncode == 0
    assert site.ddpctl("logs", "night", *arguments).returncode == 66  # it was cancelled in the queue


OUTCOMES = {
    "0": Outcome(code=0, cause="ok", message="every rank exited with 0"),
    "2": Outcome(code=3, cause="error", message="rank 1 exited with 3", node=1, rank=1),
}


def test_a_printed_command_for_a_task_prints_only_this_task(world: Callable[[str], World]) -> None:
    cluster = world("slurm")
    (cluster.bin / "squeue").unlink()
    cluster.program("squeue", "#!/bin/sh\nprintf '7|%s|FAILED|NonZeroExitCode|N/A|\\n' 0 2\n")
    folder = run_store.create(cluster.runs, "night")
    job = JobSpec(nodes="2", gpus=1, device="cpu", grace=5, command=("train.py",))
    handle = {"job": "7", "dir": str(folder), "workdir": str(cluster.folder), "tasks": ["0", "2"]}
    options = {"array": "0,2", "python": str(cluster.bin / "python")}
    place = {"cwd": str(cluster.folder), "folder": str(folder), "handle": handle}
    record = run_of(target="there", kind="slurm", options=options, job=job, **place)
    run_store.save(record)
    for task, outcome in OUTCOMES.items():
        for node in (0, 1):
            place = folder / f"task-{task}/node-{node}"
            place.mkdir(parents=True)
            NodeState(run="night", node=node, pid=4194303, state="failed", started=1000.0).write(place)
            outcome.write(place)
            (place / f"rank-{node}.log").write_text(f"task {task}\n")
    (folder / "task-2/checkpoints").mkdir()
    (folder / "task-2/checkpoints/step-00000001.pt").touch()

    closing: list[str] = []
    context = replace(launcher.open_context(cluster.env), emit=closing.append)
    (state,) = launcher.status(context, (run_store.load(cluster.runs, "night"),))
    explain.emit_end(context, record, state, 3)
    printed = []
    for text in (cluster.ddpctl("status", "night", "--task", "2").stdout, *closing):
        printed += re.findall(r"^  (?:read|resume with)  +ddpctl ([^,\n]*)", text, re.MULTILINE)
    read = "logs night --task 2 --rank 1"
    assert printed == [read, "launch --resume night --array 2", read]
    logs = cluster.ddpctl(*shlex.split(read))
    assert (logs.returncode, logs.stdout) == (0, "[node1 rank1] task 2\n")
    resumed = cluster.ddpctl(*shlex.split(printed[1]), "--dry-run")
    assert (resumed.returncode, "#SBATCH --array=2\n" in resumed.stdout) == (0, True)
