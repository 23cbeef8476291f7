"""What of a machine may hurt a training is a line each."""

import resource
import sys
import types
from dataclasses import replace

import pytest

from ddprun import health

GOOD = health.Machine(shm_bytes=8 * health.GIB, memlock_bytes=None, open_files=None, num_gpus=0)


@pytest.mark.parametrize(
    ("changes", "nproc", "device", "lines"),
    [
        ({}, 8, "", []),
        (
            {"shm_bytes": 64 * health.MIB},
            1,
            "",
            [
                "/dev/shm has 64 MiB, and DataLoader workers die when it is full: 1024 MiB is right for 1 rank "
                "(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
            ],
        ),
        (
            {"shm_bytes": health.GIB},
            8,
            "",
            [
                "/dev/shm has 1024 MiB, and DataLoader workers die when it is full: 2048 MiB is right for 8 ranks "
                "(docker run --shm-size, or in Kubernetes an emptyDir with medium: Memory)"
            ],
        ),
        ({"open_files": 256}, 1, "", ["256 open files are allowed, 1024 may be needed: ulimit -n 1024"]),
        ({"memlock_bytes": 65536}, 1, "", []),
        (
            {"memlock_bytes": 65536, "num_gpus": 1},
            1,
            "cuda",
            [
                "64 KiB may be locked in memory, and without more NCCL leaves InfiniBand for TCP: "
                "ulimit -l unlimited, before the container starts"
            ],
        ),
        ({"num_gpus": 1}, 2, "cuda", ["2 ranks on CUDA, but 1 GPU: ranks will share, or fail"]),
        (
            {"num_gpus": 2, "gpus": (health.Gpu(index=1, ecc_errors=3, pids=(12, 13)),)},
            2,
            "cuda",
            [
                "GPU 1 has had 3 uncorrected ECC errors: see nvidia-smi -q -d ECC",
                "GPU 1 is used by others too: pid 12, 13",
            ],
        ),
    ],
)
def test_what_may_hurt_is_a_line_each(changes, nproc, device, lines):
    assert list(health.warnings(replace(GOOD, **changes), nproc=nproc, num_nodes=2, device=device)) == lines


def test_reading_the_limits_of_this_machine():
    machine = health.read(0)
    assert machine.open_files in (None, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    assert machine.gpus == () or machine.num_gpus == 0


def test_what_nvml_tells(monkeypatch):
    """A double of the library, in the library's own words; a real one was not at hand."""

    def ecc_errors(handle, *_):
        if handle == "gpu1":
            raise NVMLError
        return 5

    class NVMLError(Exception):
        pass

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.86",
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: f"gpu{index}",
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a1": "gpu2"}[uuid],
        nvmlDeviceGetIndex=lambda handle: int(handle[3:]),
        nvmlDeviceGetTotalEccErrors=ecc_errors,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [types.SimpleNamespace(pid=12)] * (handle == "gpu1"),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    all_of_them = tuple(
        health.Gpu(index=index, ecc_errors=errors, pids=pids)
        for index, errors, pids in ((0, 5, ()), (1, 0, (12,)), (2, 5, ()))
    )
    assert health.read(3).gpus == all_of_them
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a1,1")
    assert health.read(2).gpus == (all_of_them[2], all_of_them[1])
    assert health.driver_version() == "570.86"
