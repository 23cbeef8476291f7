"""What may be set for the target slurm, what is refused, and the #SBATCH lines that come of it."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_slurm_batch_script import JOB

from ddpctl.command import Host
from ddpctl.targets.slurm.batch_script import directives
from ddpctl.targets.slurm.options import SlurmOptions, check_extra
from ddpctl.targets.slurm.target import SlurmTarget


def test_the_directives_of_every_option() -> None:
    job = replace(JOB, cpus=8, memory="64Gi", time_limit="30h", grace=120)
    options = SlurmOptions(
        partition="a100,h100", account="lab@x", qos="high", reservation="r1", constraint="a100&[r1|r2]", exclusive=True,
        gpu_type="a100", gpu_request="gres", array="0-3%2", requeues=0, extra=("--mail-type=END", "--licenses=x:2"),
    )  # fmt: skip
    assert directives(job, options) == (
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=8", "--gres=gpu:a100:2",
        "--mem=65536M", "--time=1-06:00:00", "--partition=a100,h100", "--account=lab@x", "--qos=high",
        "--reservation=r1", "--constraint=a100&[r1|r2]", "--array=0-3%2", "--exclusive", "--signal=B:USR1@180",
        "--no-requeue", "--open-mode=append", "--mail-type=END", "--licenses=x:2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "cause"),
    [("--nodes=3", "the key nodes"), ("--gres=disk:1,gpu:2", "gpu_request"), ("--mem=4G", "the key memory"),
     ("--signal=USR1", "no key"), ("--comment=a b", "blanks"), ("-p x", "--NAME"), ("--x=1\ntouch /tmp/x", "--NAME")],
)  # fmt: skip
def test_an_extra_option_that_is_ours_or_no_option_is_refused(extra: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        check_extra((extra,))


def test_extra_gres_join_those_of_ddpctl_because_sbatch_takes_the_last() -> None:
    options = SlurmOptions(gpu_request="gres", extra=("--gres=disk:10", "--mem=0"))
    lines = directives(JOB, options)
    assert [line for line in lines if line.startswith(("--gres", "--mem"))] == ["--gres=gpu:2,disk:10", "--mem=0"]


def test_allocation_with_spares_is_larger_and_survives_the_loss_of_a_node() -> None:
    lines = directives(replace(JOB, nodes="3", spares=2), SlurmOptions())
    assert ("--nodes=5" in lines, "--no-kill" in lines) == (True, True)
    job = replace(JOB, nodes="3", spares=1)
    assert [key for key, _ in SlurmOptions(runtime="docker").problems(job)] == ["job.spares"]


def test_a_problem_of_the_options_is_named_by_its_key() -> None:
    job = replace(JOB, time_limit="2m", memory="64Gi", env={"SLURM_X": "1"})
    problems = list(SlurmOptions(sif="/x.sif", extra=("--mem=0",)).problems(job))
    assert [key for key, _ in problems] == ["job.time_limit", "target.sif", "target.extra", "job.env"]
    assert [
        fact in message
        for fact, (_, message) in zip(("at least 4m", "'apptainer'", "64Gi", "SLURM_X"), problems, strict=True)
    ] == [True] * 4


def test_a_login_node_may_have_a_user_and_a_port() -> None:
    target = SlurmTarget(SlurmOptions(login="me@login.example:2222", workdir="/scratch"))
    (verb,) = target.status((), now=0.0).send(None)
    assert verb.host == Host(address="login.example", user="me", port=2222)
