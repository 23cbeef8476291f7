"""GPU checks against a stand-in of NVML's interface that answers documented values. No GPU was at hand."""

import json

from tests.unit.ddpcheck.test_gpu_checks import look, nvml

from ddpcheck import gpu_checks


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


class NVMLError(Exception):
    pass


def test_links_that_are_down_beside_others_and_a_lost_gpu(monkeypatch):
    nvml(monkeypatch, links_down=(3,))
    findings, _ = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("bad", "GPU 1: down: 3; 17 up")
    nvml(monkeypatch, num_links=0, lost=(1,))
    findings, kinds = look()
    assert (findings["NVLink"].status, findings["NVLink"].value) == ("ok", "none")
    assert (findings["GPUs"].status, findings["GPUs"].value) == ("bad", "GPU 1: GPU is lost")
    assert kinds["GPUs"] == "1 x NVIDIA H100 80GB HBM3"
