"""The file of a job's secrets on Slurm: whose it must be, and when it goes. Run against stand-ins."""

import subprocess
from pathlib import Path

from tests.unit.ddpctl.slurm_standins import SYSTEM

from ddpctl.targets.slurm import queue


def test_a_job_that_never_ran_leaves_no_secrets_when_it_is_stopped(tmp_path: Path) -> None:
    for program, says in (("scancel", ":"), ("squeue", "echo 'CANCELLED|'")):
        (tmp_path / program).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / program).chmod(0o755)
    folders = [tmp_path / "task-0", tmp_path / "task-1"]
    for folder in folders:
        folder.mkdir()
        (folder / "secrets").write_text("export TOKEN=hidden\n")
    for how in ("TERM", "KILL"):
        argv = ["/bin/sh", "-c", queue.STOP, "ddpctl", "7", how, "0", *map(str, folders)]
        done = subprocess.run(argv, env={"PATH": f"{tmp_path}:{SYSTEM}"}, timeout=30, check=False)
        assert done.returncode == 0
    remaining = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.parent != tmp_path)
    assert remaining == [
        "task-0/node-0", "task-0/node-0/outcome.json", "task-1/node-0", "task-1/node-0/outcome.json",
    ]  # fmt: skip
