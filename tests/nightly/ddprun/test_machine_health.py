"""What of a machine may hurt a training is a line each."""

import resource
import sys
import types

import pytest
import torch
from tests.messages import assert_names

from ddprun.system import machine as ddprun_machine
from ddpwire import machine as wire_machine
from ddpwire.machine import visible_devices

ENTRIES = ("0,2,-1,1", "-1", "", ",0", "NoDevFiles", "1,1", "0,1,01", " 3, 5,", "1gpu2,2", "GPU-a,GPU-b", "GPU-a,1",
           "1,GPU-a", "GPU-a, GPU-b", " GPU-a", "GPU-a,GPU-a")  # fmt: skip


def test_gpus_are_read_from_nvml(monkeypatch):
    """A double of the library, in the library's own words; a real one was not at hand."""

    def ecc_errors(handle, *_):
        if handle == "gpu1":
            raise NVMLError
        return 5

    def handle_of_lost(index):
        if index == 1:
            raise NVMLError("GPU is lost")
        return f"gpu{index}"

    class NVMLError(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a1": "gpu2", "GPU-b0": "gpu1"}[uuid],
        nvmlDeviceGetIndex=lambda handle: int(handle[3:]),
        nvmlDeviceGetTotalEccErrors=ecc_errors,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=12)] * (handle == "gpu1"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def assert_problems(num_gpus: int, *facts: tuple[str, ...]) -> None:
        lines = [*ddprun_machine.health_warnings(num_gpus, local_world_size=1, num_nodes=1, device="cuda")]
        problems = [line for line in lines if line.startswith("GPU ")]
        for problem, names in zip(problems, facts, strict=True):
            assert_names(problem, *names)

    first, second, third = ("GPU 0", "5", "ECC"), ("GPU 1", "pid 12"), ("GPU 2", "5", "ECC")
    assert_problems(3, first, second, third)
    monkeypatch.setattr(nvml, "nvmlDeviceGetHandleByIndex", handle_of_lost)
    assert_problems(3, first, ("GPU 1", "GPU is lost"), third)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1,GPU-b0,-1")
    assert_problems(2, third, second)
    assert ddprun_machine.driver_version() == "570.86"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3,1")
    assert ddprun_machine.count_gpus() == 2  # there is no GPU 3


def test_of_mig_instances_cuda_shows_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert ddprun_machine.count_gpus() == 1


def test_reading_the_limits_of_this_machine():
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert wire_machine.resource_limit(resource.RLIMIT_NOFILE) in (None, limit)
    lines = [*ddprun_machine.health_warnings(0, local_world_size=1, num_nodes=1, device="cpu")]
    assert not any("GPU" in line for line in lines)


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
