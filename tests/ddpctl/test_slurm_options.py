"""What may be set for the target slurm, what is refused, and the #SBATCH lines that come of it."""

import re
from dataclasses import replace

import pytest
from tests.ddpctl.test_slurm_script import JOB

from ddpctl.errors import ConfigError
from ddpctl.plan import Plan
from ddpctl.targets.slurm import SlurmOptions, SlurmTarget
from ddpctl.targets.slurm.directives import directives
from ddpctl.targets.slurm.options import check_extra

PLAN = Plan(run="r", job=JOB, cwd=".", run_dir=".", checkpoint_dir="c")


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
    ("extra", "message"),
    [
        ("--nodes=3", "--nodes is set by ddpctl: another key of the target or of the job says it"),
        ("--comment=a b", "an option of sbatch is --NAME or --NAME=VALUE, without blanks, quotes or #"),
        ("-p x", "an option of sbatch is --NAME or --NAME=VALUE, without blanks, quotes or #"),
        ("--x=1\ntouch /tmp/x", "an option of sbatch is --NAME or --NAME=VALUE, without blanks, quotes or #"),
    ],
)
def test_an_extra_option_is_checked(extra: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        check_extra((extra,))


def test_what_cannot_be_is_named_by_its_key() -> None:
    job = replace(JOB, time_limit="2m", env={"SLURM_X": "1"})
    assert list(SlurmOptions(sif="/x.sif").problems(job)) == [
        (
            "job.time_limit",
            "2m is too short: the ranks are warned 90 s before its end, or up to a minute earlier; give 4m or more, "
            "or a shorter grace",
        ),
        ("target.sif", "a .sif file is apptainer's, but the runtime is none"),
        ("job.env", "SLURM_X is Slurm's own"),
    ]


def test_a_container_cannot_have_every_folder() -> None:
    with pytest.raises(ConfigError) as raised:
        SlurmTarget(SlurmOptions(runtime="podman")).render(replace(PLAN, cwd="/a:b"))
    assert str(raised.value) == "a container cannot have the folder '/a:b': no comma, colon or line's end"
