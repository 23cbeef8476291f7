"""What of a machine may hurt a training is a line each."""

import resource
import sys
from dataclasses import replace

import pytest
import torch

from ddprun.system import machine as ddprun_machine
from ddpwire import machine as wire_machine
from ddpwire.machine import GIB, MIB, visible_devices

GOOD = ddprun_machine.MachineHealth(shm_bytes=8 * GIB, memlock_bytes=None, open_files=None, num_gpus=0)


BUSY = ddprun_machine.Gpu(index=1, ecc_errors=3, pids=(12, 13))
LOST = ddprun_machine.Gpu(index="1", ecc_errors=0, pids=(), error="GPU is lost")


@pytest.mark.parametrize(
    ("changes", "local_world_size", "device", "facts"),
    [
        ({}, 8, "", ()),
        ({"shm_bytes": 64 * MIB}, 1, "", ("64 MiB",)),
        ({"shm_bytes": GIB}, 8, "", ("2048 MiB",)),
        ({"open_files": 256}, 1, "", ("1024",)),
        ({"memlock_bytes": 65536}, 1, "", ()),
        ({"memlock_bytes": 65536, "num_gpus": 1}, 1, "cuda", ()),
        ({"memlock_bytes": 65536, "num_gpus": 1, "has_infiniband": True}, 1, "cuda", ("64 KiB",)),
        ({"num_gpus": 1, "has_infiniband": True, "infiniband_error": "no uverbs0"}, 1, "cuda", ("no uverbs0",)),
        ({"has_infiniband": True, "infiniband_error": "no uverbs0"}, 1, "", ()),
        ({"num_gpus": 1}, 2, "cuda", ("1 GPU",)),
        ({"num_gpus": 2, "gpus": (BUSY,)}, 2, "cuda", ("GPU 1 has had 3 ", "pid 12, 13")),
        ({"num_gpus": 2, "gpus": (LOST,)}, 2, "cuda", ("GPU 1 cannot be read: GPU is lost",)),
    ],
)
def test_each_warning_about_the_machine_is_a_line(changes, local_world_size, device, facts):
    health = replace(GOOD, **changes)
    lines = list(ddprun_machine.health_warnings(health, local_world_size=local_world_size, num_nodes=2, device=device))
    assert [fact in line for fact, line in zip(facts, lines, strict=True)] == [True] * len(facts)


def test_reading_the_limits_of_this_machine():
    machine = ddprun_machine.read_health(0)
    assert machine.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert machine.gpus == () or machine.num_gpus == 0


ENTRIES = ("0,2,-1,1", "-1", "", ",0", "NoDevFiles", "1,1", "0,1,01", " 3, 5,", "1gpu2,2", "GPU-a,GPU-b", "GPU-a,1",
           "1,GPU-a", "GPU-a, GPU-b", " GPU-a", "GPU-a,GPU-a")  # fmt: skip


@pytest.mark.parametrize("variable", ENTRIES)
def test_cuda_visible_devices_is_read_as_torch_reads_it(variable, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    read = torch.cuda._parse_visible_devices()
    assert visible_devices(variable) == tuple(map(str, read))
    assert ddprun_machine.count_gpus() == len(read)


def test_infiniband_that_the_container_cannot_open_has_a_reason(tmp_path, monkeypatch):
    cards, devices = tmp_path / "class", tmp_path / "dev"
    monkeypatch.setattr(wire_machine, "INFINIBAND", cards)
    monkeypatch.setattr(wire_machine, "INFINIBAND_DEVICES", devices)
    monkeypatch.setattr("ctypes.util.find_library", lambda _: "libibverbs.so.1")
    assert wire_machine.infiniband_error() == ""
    (cards / "mlx5_0").mkdir(parents=True)
    assert str(devices) in wire_machine.infiniband_error()
    devices.mkdir()
    assert str(devices) in wire_machine.infiniband_error()
    (devices / "uverbs1").touch()
    assert wire_machine.infiniband_error() == ""
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    assert "libibverbs" in wire_machine.infiniband_error()
