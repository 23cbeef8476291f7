"""The table of ``ddpctl hosts``, in 80 and in 160 columns."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from ddpctl.commands.hosts import hosts_table
from ddpctl.targets import CpuRun, GpuReport, HostReport
from ddpctl.text import cut

UUID = "GPU-8a2f6c1e-2b7d-4c55-9d0e-0123456789a"
GPUS = (
    GpuReport(uuid=f"{UUID}0", computes=True, run="night-otter", since=1000, busy_percent=97, memory_mib=71680,
              total_mib=81920),
    GpuReport(uuid=f"{UUID}1", computes=True),
    GpuReport(uuid=f"{UUID}2", computes=False, busy_percent=0, memory_mib=4, total_mib=81920),
)  # fmt: skip
HOSTS = (
    HostReport(host="box1", time=8200, load=3.5, cores=64, gpus=GPUS, waiting=("day", "late")),
    HostReport(host="box2", time=1030, cpu_runs=(CpuRun(run="small", node=2, since=1000),)),
    HostReport(host="box3", failure="10.0.0.3:22: no route to host"),
    HostReport(host="box4"),
)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_table_of_hosts_fits_the_terminal(columns: int, snapshot: Callable[..., None]) -> None:
    lines = [cut(line, columns) for line in hosts_table(HOSTS, {"small": 3})]
    assert max(map(len, lines)) <= columns
    assert any(UUID in line for line in lines) == (columns > 80)
    snapshot("".join(f"{line.rstrip()}\n" for line in lines))


def test_a_machine_that_is_reserved_for_a_spare_is_marked() -> None:
    spare = HostReport(host="box2", time=1030, cpu_runs=(CpuRun(run="small", node=3, since=1000),))
    on_gpu = replace(spare, cpu_runs=(), gpus=(replace(GPUS[0], run="small", node=3),))
    for report in (spare, on_gpu):
        assert "small (spare)" in hosts_table([report], {"small": 3})[1]
        for is_none in ({"small": 4}, {}):  # a node, and a run of another user or machine
            assert "(spare)" not in hosts_table([report], is_none)[1]
