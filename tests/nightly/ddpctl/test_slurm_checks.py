"""What is looked at before a job is sent to Slurm: that there is one, and that the script is there."""

import shutil
from pathlib import Path

import pytest
from tests.in_process import Ended, ddpctl
from tests.unit.ddpctl.answers import OK, only
from tests.unit.ddpctl.slurm_standins import SYSTEM
from tests.unit.ddpctl.test_slurm_target import DRY_RUN, LOOK, NO_CONTROLLER, ON_LOGIN, SCRIPT, refused, submit

from ddpctl.command import Command, Host, Output
from ddpctl.errors import ConfigError, UnavailableError


def test_a_script_is_missing_only_where_it_was_looked_for() -> None:
    with pytest.raises(UnavailableError, match="hpc: connection lost"):
        submit({LOOK: Output(returncode=255, stderr="connection lost")}, plan=SCRIPT, options=ON_LOGIN)
    slow = Output(returncode=124, stderr="no answer within 30 s")
    commands, submission = submit({LOOK: slow}, plan=SCRIPT, options=ON_LOGIN)
    assert submission.handle["job"] == "7", "nobody said that it is not there"
    assert only(commands, LOOK) == Command(
        argv=("test", "-f", "train.py"), cwd="/p", host=Host(address="hpc"), probe=True
    )


def test_a_dry_run_of_a_job_that_sbatch_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        submit(DRY_RUN | {"--test-only": refused("Invalid partition name specified"), "sinfo": OK})
    assert "2 nodes of 2 GPUs" in raised.value.message
    assert "Invalid partition name specified" in raised.value.message


def dry_run(folder: Path, **env: str) -> Ended:
    return ddpctl("launch", "--target", "slurm", "--dry-run", "--", "train.py", cwd=folder, **env)


def test_a_dry_run_without_slurm_prints_one_line(tmp_path: Path) -> None:
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    (nowhere / "test").symlink_to("/usr/bin/test")
    for code, fact in ((66, "train.py"), (69, "sbatch")):
        done = dry_run(tmp_path, PATH=str(nowhere))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
        assert fact in done.stderr
        (tmp_path / "train.py").touch()


@pytest.mark.skipif(not shutil.which("sbatch", path=SYSTEM), reason="needs sbatch (apt install slurm-client)")
def test_a_dry_run_without_a_controller_by_the_real_sbatch(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nGresTypes=gpu\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n"
        "MessageTimeout=1\nSlurmctldTimeout=1\nNodeName=n0 CPUs=1\n"
        "PartitionName=d Nodes=ALL Default=YES\n"
    )
    done = dry_run(tmp_path, SLURM_CONF=str(conf), PATH=SYSTEM)
    assert (done.returncode, done.stdout, NO_CONTROLLER in done.stderr) == (69, "", True)
