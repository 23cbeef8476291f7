"""What may be set for the target slurm, what is refused, and the #SBATCH lines that come of it."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_slurm_batch_script import JOB

from ddpctl.errors import ConfigError
from ddpctl.launch_plan import Plan
from ddpctl.targets.slurm.batch_script import directives
from ddpctl.targets.slurm.options import SlurmOptions, check_array, check_extra
from ddpctl.targets.slurm.target import SlurmTarget

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
    ("extra", "cause"),
    [("--nodes=3", "--nodes"), ("--comment=a b", "blanks"), ("-p x", "--NAME"), ("--x=1\ntouch /tmp/x", "--NAME")],
)
def test_an_extra_option_that_is_ours_or_no_option_is_refused(extra: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        check_extra((extra,))


def test_a_problem_of_the_options_is_named_by_its_key() -> None:
    job = replace(JOB, time_limit="2m", env={"SLURM_X": "1"})
    problems = list(SlurmOptions(sif="/x.sif").problems(job))
    assert [key for key, _ in problems] == ["job.time_limit", "target.sif", "job.env"]
    assert [
        fact in message for fact, (_, message) in zip(("at least 4m", "'apptainer'", "SLURM_X"), problems, strict=True)
    ] == [True] * 3


def test_a_container_cannot_have_every_folder() -> None:
    with pytest.raises(ConfigError, match="'/a:b'"):
        SlurmTarget(SlurmOptions(runtime="podman")).render(replace(PLAN, cwd="/a:b"))


@pytest.mark.parametrize(
    ("array", "cause"), [("3-1", "3-1"), ("0-2,9-8", "9-8"), ("0-4000001", "4,000,000"), ("x", "0-15%4")]
)
def test_an_array_that_no_slurm_takes_is_refused(array: str, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        check_array(array)


@pytest.mark.parametrize("array", ["0-3%2", "1,5,7", "0-15:4%4", "3-3"])
def test_an_array_that_slurm_takes_is_kept(array: str) -> None:
    assert check_array(array) == array
