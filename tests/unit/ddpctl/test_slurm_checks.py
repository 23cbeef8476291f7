"""What is looked at before a job is sent to Slurm: that there is one, and that the script is there."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.in_process import Ended, ddpctl
from tests.unit.ddpctl.answers import OK, only, perform
from tests.unit.ddpctl.slurm_standins import SYSTEM
from tests.unit.ddpctl.test_slurm_target import ANSWERS, DEFAULTS, GONE, NONE, PLAN, TESTED, submit

from ddpctl.command import Command, Host, Output
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget

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


def refused(reason: str) -> Output:
    """The answer of sbatch --test-only."""
    return Output(returncode=1, stderr=f"allocation failure: {reason}\n")


@pytest.mark.parametrize(
    ("tested", "cause"),
    [
        pytest.param(GONE, "not installed", id="no-sbatch"),
        pytest.param(Output(returncode=1, stderr=NO_SOURCE), "establish a configuration source", id="no-source"),
        pytest.param(Output(returncode=1, stderr=NO_ADDRESS), "control machine address", id="no-address"),
        pytest.param(
            Output(returncode=1, stderr=f"allocation failure: {NO_CONTROLLER}\n"), NO_CONTROLLER, id="no-controller"
        ),
        pytest.param(Output(returncode=124, stderr="no answer within 30 s"), "no answer within 30 s", id="no-answer"),
    ],
)
def test_a_machine_without_slurm_is_refused_before_anything_is_made(tested: Output, cause: str) -> None:
    asked: list[Command] = []
    with pytest.raises(UnavailableError) as raised:
        perform(SlurmTarget(DEFAULTS).submit(PLAN, attached=True), ANSWERS | {"--test-only": tested}, asked)
    assert (cause in raised.value.message, "'login'" in raised.value.hint) == (True, True)
    assert [command for command in asked if not command.probe] == []


def test_a_controller_that_goes_down_between_two_commands_is_named() -> None:
    failed = Output(returncode=1, stderr=f"sbatch: error: Batch job submission failed: {NO_CONTROLLER}\n")
    with pytest.raises(UnavailableError) as raised:
        submit({"--parsable": failed})
    assert NO_CONTROLLER in raised.value.message


@pytest.mark.parametrize(
    ("tested", "cause"),
    [(GONE, "not installed"), (Output(returncode=255, stderr="no answer from hpc:22\n"), "no answer from hpc:22")],
)
def test_a_login_node_that_has_no_slurm_or_does_not_answer_is_named(tested: Output, cause: str) -> None:
    with pytest.raises(UnavailableError) as raised:
        submit({"--test-only": tested}, options=ON_LOGIN)
    assert ("hpc" in raised.value.message, cause in raised.value.message) == (True, True)


LOOK = "test -f train.py"


@pytest.mark.parametrize(("options", "place"), [(DEFAULTS, "/p"), (ON_LOGIN, "/p on hpc")])
def test_a_script_that_is_not_there_is_refused(options: SlurmOptions, place: str) -> None:
    with pytest.raises(NoInputError) as raised:
        submit({LOOK: NONE}, plan=SCRIPT, options=options)
    assert ("train.py" in raised.value.message, raised.value.message.endswith(place)) == (True, True)


def test_a_script_is_missing_only_where_it_was_looked_for() -> None:
    with pytest.raises(UnavailableError, match="hpc: connection lost"):
        submit({LOOK: Output(returncode=255, stderr="connection lost")}, plan=SCRIPT, options=ON_LOGIN)
    slow = Output(returncode=124, stderr="no answer within 30 s")
    asked, submission = submit({LOOK: slow}, plan=SCRIPT, options=ON_LOGIN)
    assert submission.handle["job"] == "7", "nobody said that it is not there"
    assert only(asked, LOOK) == Command(argv=("test", "-f", "train.py"), cwd="/p", host=Host(address="hpc"), probe=True)


DRY_RUN = {"--parsable": Output(returncode=0, stdout="<job>")}


@pytest.mark.parametrize(
    ("tested", "fact"),
    [(TESTED, "2026-11-20T13:01:08"), (refused("Requested nodes are busy"), "Requested nodes are busy")],
)
def test_a_dry_run_notes_when_the_job_would_start_or_why_it_may_not(tested: Output, fact: str) -> None:
    assert fact in submit(DRY_RUN | {"--test-only": tested})[1].note


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
    for program in ("test", "printenv"):
        (nowhere / program).symlink_to(f"/usr/bin/{program}")
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
