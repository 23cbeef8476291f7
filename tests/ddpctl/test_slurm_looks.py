"""What is looked at before a job is sent to Slurm: that there is one, and that the script is there."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ddpctl.slurm_standins import SYSTEM
from tests.ddpctl.test_slurm_target import GONE, NONE, OK, PLAN, TESTED, submit

from ddpctl.command import Command, Host, Output
from ddpctl.errors import NoInputError, UnavailableError
from ddpctl.targets.slurm import SlurmOptions

NO_SOURCE = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
NO_ADDRESS = """\
sbatch: error: slurm_set_addr: Unable to resolve "head"
sbatch: error: Unable to establish control machine address
allocation failure: No error
"""
NO_CONTROLLER = "Unable to contact slurm controller (connect failure)"
ON_LOGIN = SlurmOptions(login="hpc", workdir="/p", runs="/r")
HERE = "no Slurm is reachable from this machine (%s): run this on a login node, or set login: in the target"
SCRIPT = replace(PLAN, job=replace(PLAN.job, command=("train.py",)))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (GONE, "there is no sbatch"),
        (Output(returncode=1, stderr=NO_SOURCE), "sbatch: Could not establish a configuration source"),
        (Output(returncode=1, stderr=NO_ADDRESS), "sbatch: Unable to establish control machine address"),
        (Output(returncode=1, stderr=f"allocation failure: {NO_CONTROLLER}\n"), f"sbatch: {NO_CONTROLLER}"),
        (Output(returncode=124, stderr="no answer within 30 s"), "sbatch: no answer within 30 s"),
    ],
)
def test_no_slurm_here_is_said_before_anything_is_made(said: Output, why: str) -> None:
    with pytest.raises(UnavailableError) as raised:
        submit(NONE, said)
    assert str(raised.value) == HERE % why


def test_a_controller_that_goes_down_between_two_questions() -> None:
    failed = Output(returncode=1, stderr=f"sbatch: error: Batch job submission failed: {NO_CONTROLLER}\n")
    with pytest.raises(UnavailableError) as raised:
        submit(NONE, TESTED, OK, failed)
    assert str(raised.value) == HERE % f"sbatch: {NO_CONTROLLER}"


def test_a_login_node_without_slurm_and_one_that_does_not_answer() -> None:
    with pytest.raises(UnavailableError) as raised:
        submit(GONE, options=ON_LOGIN)
    assert str(raised.value) == (
        "no Slurm is reachable from hpc (there is no sbatch): set login: in the target to a login node of the cluster"
    )
    with pytest.raises(UnavailableError) as raised:
        submit(Output(returncode=255, stderr="no answer from hpc:22\n"), options=ON_LOGIN)
    assert str(raised.value) == "hpc: no answer from hpc:22"


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(NoInputError) as raised:
        submit(NONE, plan=SCRIPT)
    assert str(raised.value) == "train.py: no such script in /p"
    with pytest.raises(NoInputError) as raised:
        submit(NONE, plan=SCRIPT, options=ON_LOGIN)
    assert str(raised.value) == "train.py: no such script in /p of hpc"
    with pytest.raises(UnavailableError) as raised:
        submit(Output(returncode=255, stderr="connection lost"), plan=SCRIPT, options=ON_LOGIN)
    assert str(raised.value) == "hpc: connection lost"
    asked, _ = submit(OK, TESTED, OK, Output(returncode=0, stdout="7\n"), plan=SCRIPT, options=ON_LOGIN)
    assert asked[0] == Command(argv=("test", "-f", "train.py"), cwd="/p", host=Host(address="hpc"), probe=True)


@pytest.mark.parametrize(
    ("tested", "note"),
    [
        (TESTED, "Slurm would take it, could start at 2026-11-20T13:01:08 on n[0-1] (partition debug)"),
        (
            Output(returncode=1, stderr="allocation failure: Invalid partition name specified\n"),
            "Slurm may not take it: Invalid partition name specified",
        ),
    ],
)
def test_a_dry_run_says_what_slurm_thinks_of_it(tested: Output, note: str) -> None:
    assert submit(NONE, tested, OK, Output(returncode=0, stdout="<job>"))[1].note == note


def dry_run(folder: Path, **env: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "ddpctl", "launch", "--target", "slurm", "--dry-run", "--", "train.py"],
        cwd=folder,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_dry_run_without_slurm_prints_one_line(tmp_path: Path) -> None:
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    for program in ("test", "printenv"):
        (nowhere / program).symlink_to(f"/usr/bin/{program}")
    missing = f"ddpctl: train.py: no such script in {tmp_path}\n"
    assert dry_run(tmp_path, PATH=str(nowhere)) == (66, "", missing)
    (tmp_path / "train.py").touch()
    assert dry_run(tmp_path, PATH=str(nowhere)) == (69, "", f"ddpctl: {HERE % 'there is no sbatch'}\n")


@pytest.mark.skipif(not shutil.which("sbatch", path=SYSTEM), reason="needs sbatch (apt install slurm-client)")
def test_a_dry_run_without_a_controller_by_the_real_sbatch(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nGresTypes=gpu\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nNodeName=n0 CPUs=1\n"
        "PartitionName=d Nodes=ALL Default=YES\n"
    )
    code, out, error = dry_run(tmp_path, SLURM_CONF=str(conf), PATH=SYSTEM)
    assert (code, out, error) == (69, "", f"ddpctl: {HERE % f'sbatch: {NO_CONTROLLER}'}\n")
