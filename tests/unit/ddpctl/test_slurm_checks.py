"""What is looked at before a job is sent to Slurm: that there is one, and that the script is there."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.answers import perform
from tests.unit.ddpctl.test_slurm_target import ANSWERS, DEFAULTS, GONE, NONE, PLAN, TESTED, submit

from ddpctl.command import Command, Output
from ddpctl.errors import NoInputError, UnavailableError
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


DRY_RUN = {"--parsable": Output(returncode=0, stdout="<job>")}


@pytest.mark.parametrize(
    ("tested", "fact"),
    [(TESTED, "2026-11-20T13:01:08"), (refused("Requested nodes are busy"), "Requested nodes are busy")],
)
def test_a_dry_run_notes_when_the_job_would_start_or_why_it_may_not(tested: Output, fact: str) -> None:
    assert fact in submit(DRY_RUN | {"--test-only": tested})[1].note
