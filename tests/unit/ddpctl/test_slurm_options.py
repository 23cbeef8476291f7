"""What may be set for the target slurm, what is refused, and the #SBATCH lines that come of it."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_slurm_batch_script import JOB

from ddpctl.targets.slurm.batch_script import directives
from ddpctl.targets.slurm.options import SlurmOptions, check_extra


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
