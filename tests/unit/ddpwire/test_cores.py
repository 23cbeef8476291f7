"""The number of cores that a process may use: its affinity mask and the quota of its cgroup."""

import os
from pathlib import Path

import pytest

from ddpwire import machine

V2, V1 = "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/cpu/cpu.cfs_quota_us"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({V2: "max 100000\n"}, 8),
        ({V2: "250000 100000\n"}, 2),
        ({V2: "50000 100000\n"}, 1),
        ({V2: "6400000 100000\n"}, 8),
        ({V1: "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({V1: "300000\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_quota_of_the_cgroup_limits_the_cores(monkeypatch, tmp_path, files, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / Path(path).relative_to("/"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    assert machine.usable_cores() == cores
