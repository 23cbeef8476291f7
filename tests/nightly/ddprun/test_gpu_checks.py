"""GPU checks against a stand-in of NVML's interface that answers documented values. No GPU was at hand."""

import sys
import types

import pynvml
import pytest
from tests.unit.ddpcheck import test_gpu_checks
from tests.unit.ddpcheck.test_gpu_checks import NVMLError, look, nvml

from ddpcheck import gpu_checks


def test_links_that_are_down_beside_others_and_a_lost_gpu(monkeypatch):
    nvml(monkeypatch, links_down=(3,))
    findings, _ = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("bad", "GPU 1: down: 3; 17 up")
    nvml(monkeypatch, num_links=0, lost=(1,))
    findings, kinds = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("ok", "none")
    assert (findings["GPUs"].status, findings["GPUs"].value) == ("bad", "GPU 1: GPU is lost")
    assert kinds["GPUs"] == "1 x NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("code", "extra", "reason", "kinds"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, {}, "no GPU: NVML Shared Library Not Found", {"GPUs": "none"}),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, {}, "no GPU: Driver Not Loaded", {"GPUs": "none"}),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, {"GPUs": "bad"}, "NVML cannot be used: RM has detected an", {}),
        (None, {}, "NVML cannot be used: import of pynvml", {}),  # it is not installed
    ],
)
def test_without_nvml_every_check_is_said_not_to_be_made(monkeypatch, code, extra, reason, kinds):
    def fail():
        raise pynvml.NVMLError(code)

    monkeypatch.setitem(sys.modules, "pynvml", code and types.SimpleNamespace(nvmlInit=fail))
    findings, inventory = gpu_checks.look()
    assert {finding.check: finding.status for finding in findings} == dict.fromkeys(
        gpu_checks.GPU_CHECKS, "not looked at"
    ) | extra
    assert all(finding.value.startswith(reason) for finding in findings)
    assert inventory == kinds


@pytest.mark.parametrize(
    ("xid", "age_s", "status"),
    [(79, 60, "bad"), (79, 200_000, "warning"), (63, 60, "warning"), (13, 60, "ok"), (None, 60, "ok")],
)
def test_xids_of_the_kernel_log(monkeypatch, tmp_path, xid, age_s, status):
    now = 300_000.0
    monkeypatch.setattr(gpu_checks.time, "clock_gettime", lambda _: now)
    at = int((now - age_s) * 1e6)
    line = f"3,1204,{at},-;NVRM: Xid (PCI:0000:3b:00): {xid}, pid=1, name=python, GPU has fallen off the bus.\n"
    (tmp_path / "kmsg").write_text(f"6,1,2,-;eth0: link up\n{line if xid else ''}")
    assert gpu_checks.check_kernel_log(str(tmp_path / "kmsg")).status == status
    assert gpu_checks.check_kernel_log(str(tmp_path / "absent")).status == "not looked at"


@pytest.mark.parametrize(
    ("answers", "check", "status", "value"),
    [
        ({"nvmlDeviceGetRemappedRows": (0, 1, 1, 0)}, "GPU memory", "bad", "remapped at the next reset"),
        ({"nvmlDeviceGetRemappedRows": (3, 2, 0, 0)}, "GPU memory", "ok", "2 rows remapped"),
        ({"nvmlDeviceGetCurrPcieLinkWidth": 1}, "PCIe", "bad", "GPU 1: x1 of x16"),
        ({"nvmlDeviceGetMigMode": (1, 1)}, "MIG", "warning", "GPU 1: on"),
        ({"nvmlDeviceGetMigMode": NVMLError("Not Supported")}, "MIG", "ok", "off"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x20}, "GPU clocks", "warning", "thermal"),
        ({"nvmlDeviceGetNvLinkErrorCounter": 4}, "NVLink", "warning", "recoveries"),
        (
            {"nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=4711)]},
            "GPU processes",
            "warning",
            "GPU 1: used by pid 4711",
        ),
        ({"nvmlDeviceGetCurrPcieLinkWidth": NVMLError("Unknown Error")}, "PCIe", "not looked at", "Unknown Error"),
    ],
)
def test_what_is_wrong_with_a_gpu_is_a_finding(monkeypatch, answers, check, status, value):
    test_gpu_checks.test_what_is_wrong_with_a_gpu_is_a_finding(monkeypatch, answers, check, status, value)
