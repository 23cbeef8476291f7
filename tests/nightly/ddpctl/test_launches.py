"""Each cause of a failed run on each target whose nodes are processes here."""

from itertools import product

import pytest
from tests.contract.ddpctl import test_launches
from tests.contract.ddpctl.conftest import world as world

CAUSES = (("exit=3@1", 3, "error"), ("cause=oom:137", 137, "oom"), ("cause=hang:144", 144, "hang"))
ALL = [(kind, *cause) for kind, cause in product(("local", "ssh", "slurm"), CAUSES)]
REST = [case for case in ALL if case not in test_launches.FAILURES]


@pytest.mark.parametrize(
    ("kind", "script", "code", "cause"), [case for case in ALL if case not in test_launches.FAILURES]
)
def test_a_failed_run_ends_the_launch_with_its_code(
    kind: str, script: str, code: int, cause: str, world: test_launches.Worlds
) -> None:
    test_launches.test_a_failed_run_ends_the_launch_with_its_code(kind, script, code, cause, world)
