"""A command that ddpctl prints for one task of an array is about that task alone."""

import re
import shlex
from collections.abc import Callable
from dataclasses import replace

from tests.contract.ddpctl.conftest import world as world
from tests.contract.ddpctl.worlds import World
from tests.unit.ddpctl.records import run_of

from ddpctl.commands import explain
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.runs import run_store
from ddpwire.run_files import NodeState, Outcome

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
