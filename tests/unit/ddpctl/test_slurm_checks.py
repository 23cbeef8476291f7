"""What is looked at before a job is sent to Slurm: that there is one, and that the script is there."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import Ended, ddpctl
from tests.unit.ddpctl.slurm_standins import SYSTEM
from tests.unit.ddpctl.test_slurm_target import GONE, NONE, OK, PLAN, TESTED, submit
from tests.wording import Wording

from ddpctl.command import Command, Host, Output
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.targets.slurm.options import SlurmOptions

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
SCRIPT = replace(PLAN, job=replace(PLAN.job, command=("train.py",)))


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(GONE, id="no-sbatch"),
        pytest.param(Output(returncode=1, stderr=NO_SOURCE), id="no-source"),
        pytest.param(Output(returncode=1, stderr=NO_ADDRESS), id="no-address"),
        pytest.param(Output(returncode=1, stderr=f"allocation failure: {NO_CONTROLLER}\n"), id="no-controller"),
        pytest.param(Output(returncode=124, stderr="no answer within 30 s"), id="no-answer"),
    ],
)
def test_a_machine_without_slurm_is_refused_before_anything_is_made(said: Output, wording: Wording) -> None:
    with pytest.raises(UnavailableError) as raised:
        submit(NONE, said)
    wording(raised.value)


def test_a_controller_that_goes_down_between_two_commands(wording: Wording) -> None:
    failed = Output(returncode=1, stderr=f"sbatch: error: Batch job submission failed: {NO_CONTROLLER}\n")
    with pytest.raises(UnavailableError) as raised:
        submit(NONE, TESTED, OK, failed)
    wording(raised.value)


def test_a_login_node_without_slurm_and_one_that_does_not_answer(wording: Wording) -> None:
    with pytest.raises(UnavailableError) as raised:
        submit(GONE, options=ON_LOGIN)
    wording(raised.value)
    with pytest.raises(UnavailableError) as raised:
        submit(Output(returncode=255, stderr="no answer from hpc:22\n"), options=ON_LOGIN)
    wording(raised.value)


def test_a_script_that_is_not_there(wording: Wording) -> None:
    with pytest.raises(NoInputError) as raised:
        submit(NONE, plan=SCRIPT)
    wording(raised.value)
    with pytest.raises(NoInputError) as raised:
        submit(NONE, plan=SCRIPT, options=ON_LOGIN)
    wording(raised.value)
    with pytest.raises(UnavailableError) as raised:
        submit(Output(returncode=255, stderr="connection lost"), plan=SCRIPT, options=ON_LOGIN)
    wording(raised.value)
    slow = Output(returncode=124, stderr="no answer within 30 s")
    asked, _ = submit(slow, TESTED, OK, Output(returncode=0, stdout="7\n"), plan=SCRIPT, options=ON_LOGIN)
    assert len(asked) == 4, "nobody said that it is not there"
    asked, _ = submit(OK, TESTED, OK, Output(returncode=0, stdout="7\n"), plan=SCRIPT, options=ON_LOGIN)
    assert asked[0] == Command(argv=("test", "-f", "train.py"), cwd="/p", host=Host(address="hpc"), probe=True)


@pytest.mark.parametrize(
    ("tested", "refused"),
    [
        (TESTED, False),
        (Output(returncode=1, stderr="allocation failure: Invalid partition name specified\n"), True),
        (Output(returncode=1, stderr="allocation failure: Requested nodes are busy\n"), False),
    ],
    ids=["taken", "not-taken", "may-wait"],
)
def test_a_dry_run_ends_as_sbatch_would(tested: Output, refused: bool, wording: Wording) -> None:
    if refused:
        with pytest.raises(ConfigError) as raised:
            submit(NONE, tested, OK, Output(returncode=0, stdout="<job>"), Output(returncode=0))
        wording(raised.value)
    else:
        wording(submit(NONE, tested, OK, Output(returncode=0, stdout="<job>"))[1].note)


def dry_run(folder: Path, **env: str) -> Ended:
    return ddpctl("launch", "--target", "slurm", "--dry-run", "--", "train.py", cwd=folder, **env)


def test_a_dry_run_without_slurm_prints_one_line(tmp_path: Path, wording: Wording) -> None:
    nowhere = tmp_path / "bin"
    nowhere.mkdir()
    for program in ("test", "printenv"):
        (nowhere / program).symlink_to(f"/usr/bin/{program}")
    for code in (66, 69):
        done = dry_run(tmp_path, PATH=str(nowhere))
        assert (done.returncode, done.stdout) == (code, "")
        wording(done.stderr)
        (tmp_path / "train.py").touch()


@pytest.mark.skipif(not shutil.which("sbatch", path=SYSTEM), reason="needs sbatch (apt install slurm-client)")
def test_a_dry_run_without_a_controller_by_the_real_sbatch(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "train.py").touch()
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=x\nGresTypes=gpu\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n"
        "MessageTimeout=1\nSlurmctldTimeout=1\nNodeName=n0 CPUs=1\n"
        "PartitionName=d Nodes=ALL Default=YES\n"
    )
    done = dry_run(tmp_path, SLURM_CONF=str(conf), PATH=SYSTEM)
    assert (done.returncode, done.stdout) == (69, "")
    wording(done.stderr)
