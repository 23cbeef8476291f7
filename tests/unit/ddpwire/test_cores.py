"""The limits of a process: its affinity mask, and the quotas and the memory of its cgroup and the parents of that."""

import os
from functools import partial
from pathlib import Path

import pytest

from ddpwire import machine

V2, V1, PERIOD = "cpu.max", "cpu,cpuacct/cpu.cfs_quota_us", "cpu,cpuacct/cpu.cfs_period_us"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The root of the cgroups of this process, which is in /job/step of each hierarchy."""
    (tmp_path / "own").write_text("4:cpu,cpuacct:/job/step\n3:memory:/job/step\n0::/job/step\n")
    monkeypatch.setattr(machine, "cgroups", partial(machine.cgroups, own=tmp_path / "own", root=tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({V2: "250000 100000\n"}, 2),
        ({V2: "50000 100000\n"}, 1),
        ({V1: "300000\n", PERIOD: "100000\n"}, 3),
        ({V2: "600000 100000\n", "job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 100000\n"}, 4),
    ],
)
def test_quotas_of_cgroups_limit_the_cores(root: Path, files: dict[str, str], cores: int) -> None:
    write(root, files)
    assert machine.usable_cores() == cores


def test_a_system_without_cgroups_has_none(root: Path) -> None:
    (root / "own").unlink()
    assert list(machine.cgroups("cpu")) == []
