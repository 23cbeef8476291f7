"""The notations of Slurm's lists."""

import pytest

from ddprun.settings import launchers


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu08", "gpu07"),
        ("gpu[07-09,12],x1", "gpu07"),
        ("gpu[12,07-09]", "gpu12"),
        ("rack[1-2]n[05,07].site", "rack1n05.site"),
        ("a-b[3]", "a-b3"),
    ],
)
def test_the_first_host_of_slurms_list(nodes, first):
    assert launchers.first_host(nodes) == first


def test_the_tasks_of_slurms_nodes():
    assert launchers.slurm_tasks("2(x3),1,4(x2)") == (2, 2, 2, 1, 4, 4)
