"""GPU checks against a stand-in of NVML's interface that answers documented values. No GPU was at hand."""

import json
import sys
import types

import pytest

from ddpcheck import gpu_checks

HEALTHY = {
    "nvmlDeviceGetTotalEccErrors": 0,
    "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
    "nvmlDeviceGetCurrPcieLinkWidth": 16,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetNvLinkErrorCounter": 0,
    "nvmlDeviceGetMigMode": (0, 0),
    "nvmlDeviceGetComputeRunningProcesses": [],
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,  # idle
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
}


class NVMLError(Exception):
    pass


def nvml(monkeypatch, broken=None, *, num_links=18, links_down=(), lost=()):
    """Two GPUs; ``broken``: what the functions of GPU 1 answer, or raise."""
    broken = broken or {}

    def answer(name):
        def call(handle, *_):
            value = broken.get(name, HEALTHY[name]) if handle == 1 else HEALTHY[name]
            if isinstance(value, Exception):
                raise value
            return value

        return call

    def handle_of(index):
        if index in lost:
            raise NVMLError("GPU is lost")
        return index

    def link_state(handle, link):
        if link >= num_links:
            raise NVMLError("Invalid Argument")
        return int(not (handle == 1 and link in links_down))

    def not_supported(*_):
        raise NVMLError("Not Supported")

    double = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        NVML_NVLINK_MAX_LINKS=18,
        NVML_NVLINK_ERROR_DL_RECOVERY=1,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "570.86.15",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=handle_of,
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetRetiredPagesPendingStatus=not_supported,  # from Ampere on
        **{name: answer(name) for name in HEALTHY},
    )
    monkeypatch.setitem(sys.modules, "pynvml", double)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def look():
    findings, kinds = gpu_checks.look()
    return {finding.check: finding for finding in [*findings, gpu_checks.check_clocks()]}, kinds


def test_healthy_gpus_are_ok(monkeypatch):
    nvml(monkeypatch)
    findings, kinds = look()
    assert {check for check, finding in findings.items() if finding.status != "ok"} <= {
        "DCGM",
        "Xid",
    }  # as this machine is
    assert kinds == {"GPUs": "2 x NVIDIA H100 80GB HBM3", "driver": "570.86.15"}


@pytest.mark.parametrize(
    ("answers", "check", "status", "value"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 2}, "GPU memory", "bad", "2 uncorrected ECC errors"),
        ({"nvmlDeviceGetRemappedRows": (0, 9, 0, 1)}, "GPU memory", "bad", "could not be remapped"),
        ({"nvmlDeviceGetCurrPcieLinkWidth": 8}, "PCIe", "warning", "GPU 1: x8 of x16"),
        ({"nvmlDeviceGetMigMode": (0, 1)}, "MIG", "bad", "next reset"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, "GPU clocks", "bad", "hardware thermal slowdown"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x4}, "GPU clocks", "ok", ""),  # the power cap
    ],
)
def test_what_is_wrong_with_a_gpu_is_a_finding(monkeypatch, answers, check, status, value):
    nvml(monkeypatch, answers)
    findings, _ = look()
    assert (findings[check].status, value in findings[check].value) == (status, True)
    assert {name for name, finding in findings.items() if finding.status == "bad"} - {"Xid", "DCGM"} <= {check}


def test_answers_of_dcgm_are_findings(monkeypatch, tmp_path):
    three = {"DCGM GPU Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
        {"name": "Denylist", "results": [{"gpu_ids": "0,1", "status": "PASS"}]},
        {"name": "Page Retirement/Row Remap", "results": [{"gpu_ids": "1", "status": "FAIL", "warnings": "..."}]},
    ]}]}}  # fmt: skip
    four = {"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": [
        {"name": "software", "results": [{"entity_group": "GPU", "entity_id": 0, "status": "Pass"}],
         "test_summary": {"status": "Pass"}},
    ]}]}}  # fmt: skip
    down = {"DCGM Diagnostic": {"runtime_error": "unable to establish a connection"}}
    skipped = {"DCGM Diagnostic": {"tests": [{"name": "software", "results": [{"status": "Skip"}]}]}}
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    results = []
    for answer in (three, four, down, skipped):
        (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
        (tmp_path / "dcgmi").chmod(0o755)
        results.append((gpu_checks.check_dcgm().status, gpu_checks.check_dcgm().value))
    assert results == [
        ("bad", "Page Retirement/Row Remap"),
        ("ok", "diag -r 1 passes"),
        ("not looked at", "dcgmi diag: unable to establish a connection"),
        ("not looked at", "dcgmi diag: no test passed or failed"),
    ]
