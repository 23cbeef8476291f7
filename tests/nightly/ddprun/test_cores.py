"""The limits of a process: its affinity mask, and the quotas and the memory of its cgroup and the parents of that."""

import pytest
from tests.unit.ddpwire import test_cores
from tests.unit.ddpwire.test_cores import PERIOD, V1, V2

root = test_cores.root  # the fixture


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({V2: "max 100000\n"}, 8),
        ({V2: "6400000 100000\n"}, 8),
        ({V1: "-1\n", PERIOD: "100000\n"}, 8),
        ({"cpuacct,cpu/cpu.cfs_quota_us": "300000\n", "cpuacct,cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_quotas_of_cgroups_limit_the_cores(root, files, cores):
    test_cores.test_quotas_of_cgroups_limit_the_cores(root, files, cores)
