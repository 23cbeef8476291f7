"""What may be set for the target slurm, what is refused, and the #SBATCH lines that come of it."""

from dataclasses import replace

import pytest
from tests.unit.ddpctl.test_slurm_batch_script import JOB

from ddpctl.errors import ConfigError
from ddpctl.job.launch_plan import Plan
from ddpctl.targets.slurm.options import SlurmOptions, check_array
from ddpctl.targets.slurm.target import SlurmTarget

PLAN = Plan(name="r", job=JOB, cwd=".", folder=".", checkpoint_dir="c")


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
