"""From a job to what each node is told."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.ddpctl.records import run_of

from ddpctl.job.launch_plan import Plan, command_line, contract, ddprun_args, program, script_of, title
from ddpctl.job.spec import JobSpec, check_command
from ddpctl.operations import launcher

PROGRAMS = {
    (): ("-m", "ddptrain"),
    ("--epochs", "3"): ("-m", "ddptrain", "--epochs", "3"),
    ("ddptrain", "--epochs", "3"): ("-m", "ddptrain", "--epochs", "3"),
    ("train.py", "--lr", "0.1"): ("train.py", "--lr", "0.1"),
    ("python", "train.py"): ("train.py",),
    ("python3", "-m", "project.train", "-x"): ("-m", "project.train", "-x"),
    ("-m", "project.train"): ("-m", "project.train"),
}


@pytest.mark.parametrize(("command", "arguments"), PROGRAMS.items(), ids=lambda value: " ".join(value) or "nothing")
def test_a_command_becomes_the_program_that_ddprun_starts(command: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    assert program(command) == arguments


def test_a_module_is_no_file() -> None:
    assert script_of(("-m", "project.train")) is None
    assert script_of(("train.py", "x")) == "train.py"


def test_a_title_has_nodes_ranks_and_the_script_without_its_arguments() -> None:
    assert title(JobSpec()) == "1 node x 1 rank of ddptrain"
    assert title(JobSpec(nodes="1:4", gpus=2, command=("src/train.py", "--lr", "1"))) == (
        "1:4 nodes x 2 ranks of src/train.py"
    )


def test_a_command_line_is_quoted_for_a_shell() -> None:
    assert command_line(JobSpec(command=("train.py", "a b"))) == "train.py 'a b'"
    assert command_line(JobSpec(command=("--epochs", "3"))) == "ddptrain --epochs 3"
    assert command_line(JobSpec(command=("-m", "project.train"))) == "-m project.train"


def test_the_contract_and_arguments_of_a_node() -> None:
    job = JobSpec(
        nodes="2:3",
        gpus=4,
        command=("train.py", "--lr", "0.1"),
        grace=2.5,
        join_timeout=7,
        hang_timeout=0,
        max_restarts=1,
        checkpoint_copies=2,
    )
    plan = Plan(name="digits-otter", job=job, cwd="/p", folder="/r", checkpoint_dir="/r/checkpoints")
    assert plan.job.world_size == 12
    assert contract(plan, node=2, addr="10.0.0.1", port="40001") == {
        "PET_NNODES": "2:3",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "10.0.0.1",
        "PET_MASTER_PORT": "40001",
        "DDP_RUN_ID": "digits-otter",
        "DDP_RUN_DIR": "/r",
        "DDP_CHECKPOINT_DIR": "/r/checkpoints",
        "DDP_SECRET_FILE": "/r/store.secret",
    }
    launched = replace(plan, uid="0a1b2c3d4e5f", user="ann")
    environ = contract(launched, node=2, addr="10.0.0.1", port="40001").items()
    assert environ - contract(plan, node=2, addr="10.0.0.1", port="40001").items() == {
        ("DDP_RUN_UID", "0a1b2c3d4e5f"),
        ("DDP_USER", "ann"),
    }
    assert " ".join(ddprun_args(plan)) == (
        "--grace 2.5 --restart-limit 1 --join-timeout 7 --hang-timeout 0 --checkpoint-copies 2 train.py --lr 0.1"
    )


@pytest.mark.parametrize(
    ("handle", "job", "resumes"),
    [
        ({"pids": [7]}, JobSpec(), ()),  # ddpctl itself sees whether there is a checkpoint
        ({"logs": "box1:~/runs/night"}, JobSpec(), ("--resumes", "night")),
        ({"logs": "box1:~/runs/night"}, JobSpec(checkpoint_dir="s3://bucket"), ()),  # ddptrain looks there
    ],
)
def test_the_nodes_are_told_which_run_they_resume_if_only_they_see_its_checkpoints(
    handle: dict[str, object], job: JobSpec, resumes: tuple[str, ...]
) -> None:
    old = run_of(kind="ssh", job=job, handle=handle)
    request = launcher.Request(job=job, target="t", kind="ssh", options=None, why="", cwd="/p", resumes=old)
    assert ddprun_args(launcher.plan_of(request, "night-2", Path("/r/night-2")))[-len(resumes) - 2 : -2] == resumes


@pytest.mark.parametrize(
    "command", [("",), ("-m",), ("-m", ""), ("python", ""), ("python3", "-m"), ("a\0b",)], ids=repr
)
def test_a_command_without_a_program_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"empty|module|NUL"):
        check_command(command)
    assert check_command(("-m", "train", "")) == ("-m", "train", "")
