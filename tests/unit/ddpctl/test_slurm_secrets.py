"""The file of a job's secrets on Slurm: whose it must be, and when it goes. Run against stand-ins."""

from dataclasses import replace
from pathlib import Path

from tests.unit.ddpctl.slurm_standins import StandIns
from tests.unit.ddpctl.test_slurm_batch_script import JOB

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
