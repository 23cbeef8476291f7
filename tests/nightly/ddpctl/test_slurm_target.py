"""The verbs of the target slurm: their command lines, and what they make of the answers."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl import test_slurm_target
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.test_slurm_target import (
    BOTH_RUN,
    DEFAULTS,
    NO_CONTROLLER,
    PLAN,
    RUN,
    SENT,
    UID,
    answered,
    log_files,
    submit,
)

from ddpctl.command import Command, Output
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.targets import LogQuery, Submission, default_kind
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.batch_script import render_script
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


def test_a_job_after_a_run_that_has_no_record_is_refused() -> None:
    with pytest.raises(NoInputError, match=r"'day'.*/r/day/run\.json"):
        submit({"run_store.read": Output(returncode=0)}, options=SlurmOptions(after="day"))


def test_logs_with_timestamps_are_those_of_every_rank() -> None:
    timed = log_files(LogQuery(ranks=(3,), timestamps=True))
    assert timed == ("7", "+1", "", "/r/night/node-1/timed/rank-3.log", "", "/r/night/node-1/timed/rank-3.1.log")
    every = log_files(LogQuery(timestamps=True, tail=5))
    assert [path.removeprefix("/r/night/") for path in every[3::2]] == [
        f"node-{node}/timed/{name}.log"
        for node in (0, 1)
        for name in ("ddprun", f"rank-{2 * node}", f"rank-{2 * node + 1}")
    ]


def test_logs_of_an_array_are_those_of_its_tasks() -> None:
    array = replace(RUN, handle=RUN.handle | {"tasks": ["4"]})
    with pytest.raises(ConfigError):
        log_files(LogQuery(timestamps=True), array)
    assert log_files(LogQuery(), array) == ("7", "+1", "[task 4] ", "/r/night/job-4.log")
    (task,) = SlurmTarget(SlurmOptions()).tasks(array)
    assert log_files(LogQuery(), task) == ("7_4", "+1", "", "/r/night/job-4.log")
    assert log_files(LogQuery(ranks=(1,)), task) == ("7_4", "+1", "[node0 rank1] ", "/r/night/task-4/node-0/rank-1.log")


def test_an_array_after_another_run_depends_on_its_job() -> None:
    day = replace(RUN, handle={"job": "5", "dir": "/r/day"})
    record: dict[str, Answer] = {
        "run_store.read": Output(returncode=0, value=day),
        "--parsable": lambda command: (
            Output(returncode=0, stdout="==> squeue <==\n5|N/A|RUNNING||N/A|\n") if queue.ASK in command.argv else SENT
        ),
    }
    commands, submission = submit(record, options=SlurmOptions(after="day", array="0-2%2"))
    assert only(commands, "run_store.read").call.args == (Path("/r/day"),)
    assert only(commands, "--parsable /r").argv == (
        "sbatch", "--job-name=night", "--output=/r/night/job-%a.log", "--chdir=/p", "--dependency=afterok:5",
        "--kill-on-invalid-dep=yes", "--parsable", "/r/night/job.sh", UID,
    )  # fmt: skip
    assert submission.handle["tasks"] == ["0", "1", "2"]


def test_inside_of_an_allocation_its_nodes_are_used() -> None:
    commands, submission = submit({"bash ": Output(returncode=0, stdout="1234\n")}, SLURM_JOB_ID="99")
    assert matching(commands, "sbatch --job") == []
    assert only(commands, "cat >").argv[-1] == "/r/night/job.sh"
    assert only(commands, "bash /r/night/job.sh") == Command(
        argv=("bash", "/r/night/job.sh"), cwd="/p", mode="background", output="/r/night/job.log", placeholder="<pid>",
        starts=True,
    )  # fmt: skip
    assert submission.handle == {"job": "99", "pid": "1234", "dir": "/r/night", "workdir": "/p"}
    assert "job 99" in submission.note
    (kind, reason), (outside, _) = default_kind({"SLURM_JOB_ID": "99"}), default_kind({})
    assert (kind, "job 99" in reason, outside) == ("slurm", True, "local")


def test_a_command_runs_beside_the_ranks_of_a_node() -> None:
    target = SlurmTarget(DEFAULTS)
    commands, code = perform(target.execute(RUN, node=1, argv=("nvidia-smi",), tty=False), {"": Output(returncode=3)})
    command = only(commands)
    assert (command.argv[4:], command.mode, code) == (("7", "1", "/p", "--", "nvidia-smi"), "stream", 3)
    docker = SlurmTarget(SlurmOptions(runtime="docker"))
    command = only(perform(docker.execute(RUN, node=1, argv=(), tty=True), {})[0])
    assert command.argv[4:] == ("7", "1", "/p", "--pty", "--", "docker", "exec", "-it", "ddpctl-7-1", "bash")
    assert command.mode == "tty"


SBATCH = ("sbatch", "--job-name=night", "--output=/r/night/job.log", "--chdir=/p")


def test_submit_asks_when_the_job_would_start_and_sends_the_script() -> None:
    commands, submission = submit({"--parsable": Output(returncode=0, stdout="7;lab\n")})
    script = render_script(PLAN, SlurmOptions())
    assert only(commands, "--test-only") == Command(argv=(*SBATCH, "--test-only"), stdin=script, probe=True)
    written = only(commands, "cat >")
    assert (written.argv[-1], written.stdin) == ("/r/night/job.sh", script)
    assert only(commands, "--parsable") == Command(
        argv=(*SBATCH, "--parsable", "/r/night/job.sh", UID), placeholder="<job>", timeout_s=120, starts=True
    )
    assert submission == Submission(
        handle={"job": "7", "dir": "/r/night", "workdir": "/p"},
        note=submission.note,
        checkpoint_dir="/r/night/checkpoints",
    )
    assert [fact in submission.note for fact in ("job 7", "2026-11-20T13:01:08", "n[0-1]", "debug")] == [True] * 4
    assert "_ddp_dir=/r/night\n" in script


@pytest.mark.parametrize(
    ("tested", "cause"),
    [
        pytest.param(Output(returncode=1, stderr=NO_SOURCE), "establish a configuration source", id="no-source"),
        pytest.param(Output(returncode=1, stderr=NO_ADDRESS), "control machine address", id="no-address"),
        pytest.param(
            Output(returncode=1, stderr=f"allocation failure: {NO_CONTROLLER}\n"), NO_CONTROLLER, id="no-controller"
        ),
    ],
)
def test_a_machine_without_slurm_is_refused_before_anything_is_made(tested, cause):
    test_slurm_target.test_a_machine_without_slurm_is_refused_before_anything_is_made(tested, cause)


@pytest.mark.parametrize(
    ("text", "state", "code", "fact"),
    [
        (answered("7|N/A|PENDING|PartitionNodeLimit|N/A|"), "pending", None, "partition"),
        (answered("7|N/A|PENDING|ReqNodeNotAvail, UnavailableNodes:node-2|N/A|"), "pending", None, "node-2"),
        (answered("7|N/A|RUNNING|None|x|n[0-1]", *BOTH_RUN), "running", None, "2 of 2"),
        (answered("7|N/A|NEW_STATE|None|x|"), "unknown", None, "NEW_STATE"),
    ],
    ids=["PartitionNodeLimit", "ReqNodeNotAvail", "training", "NEW_STATE"],
)
def test_the_state_of_a_job_follows_from_squeue_and_its_nodes_files(text, state, code, fact):
    test_slurm_target.test_the_state_of_a_job_follows_from_squeue_and_its_nodes_files(text, state, code, fact)
