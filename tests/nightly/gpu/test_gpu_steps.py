"""The CPU form of each step of `make gpu`, so that no minute on a GPU is lost to a typing error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PATH = os.environ["PATH"]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", [1, 2, 3])
def test_each_step_passes_on_a_cpu(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", PATH)  # torch.compile needs a C++ compiler
    command = [sys.executable, "bench/gpu.py", "--cpu", f"--part={part}", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert {result["step"]: result["last_line"] for result in results if result["state"] != "passed"} == {}
    assert done.returncode == 0, done.stdout
