"""The file of a job's secrets on Slurm: whose it must be, and when it goes. Run against stand-ins."""

import subprocess
from dataclasses import replace
from pathlib import Path

from tests.unit.ddpctl.slurm_standins import SYSTEM, StandIns
from tests.unit.ddpctl.test_slurm_batch_script import JOB

from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions


def test_secrets_that_others_can_read_are_not_read(tmp_path: Path) -> None:
    stand_ins = StandIns(tmp_path)
    run_dir = stand_ins.folder / "runs" / "train-4711"
    run_dir.mkdir(parents=True)
    secrets = run_dir / "secrets"
    job = replace(JOB, secrets=("TOKEN",))
    secrets.write_text("export TOKEN=hidden\n")
    secrets.chmod(0o644)
    done = stand_ins.run(job, SlurmOptions())
    assert (done.code, f"{run_dir}/secrets" in done.said) == (78, True)
    assert not secrets.exists()
    secrets.write_text("export TOKEN=hidden\n")
    secrets.chmod(0o600)
    done = stand_ins.run(job, SlurmOptions())
    assert [call.env["TOKEN"] for call in done.of("ddprun")[2:]] == ["hidden", "hidden"]
    assert not secrets.exists()


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
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.parent != tmp_path)
    assert left == [
        "task-0/node-0", "task-0/node-0/outcome.json", "task-1/node-0", "task-1/node-0/outcome.json",
    ]  # fmt: skip
