"""GPU checks against a stand-in of NVML's interface that answers documented values. No GPU was at hand."""

import json

from ddpcheck import gpu_checks


def test_what_dcgm_answers(monkeypatch, tmp_path):
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
    found = []
    for answer in (three, four, down, skipped):
        (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
        (tmp_path / "dcgmi").chmod(0o755)
        found.append((gpu_checks.check_dcgm().status, gpu_checks.check_dcgm().value))
    assert found == [
        ("bad", "Page Retirement/Row Remap"),
        ("ok", "diag -r 1 passes"),
        ("not looked at", "dcgmi diag: unable to establish a connection"),
        ("not looked at", "dcgmi diag: no test passed or failed"),
    ]
