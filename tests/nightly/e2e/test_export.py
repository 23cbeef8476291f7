"""ddpctl export of a run that has no weights, and the example's ONNX where its packages are installed."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import ROOT, ddpctl
from tests.in_process import ddpctl as in_process

PREDICT = ROOT / "examples" / "predict.py"
ABSENT = [name for name in ("onnxscript", "onnxruntime") if not find_spec(name)]  # no development dependencies: 40 MB


@pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)}")
def test_the_guides_onnx_file_predicts_as_the_weights_do(tmp_path: Path) -> None:
    assert ddpctl("launch", "--name", "digits", "--", "--epochs", "5", cwd=tmp_path).returncode == 0
    exported = ddpctl("export", "digits", "weights.pt", cwd=tmp_path)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", exported.stdout)
    done = forks.run([str(PREDICT), "--onnx", "digits.onnx"], cwd=tmp_path, env=os.environ, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (share,) = re.findall(r"([\d.]+)% of 360 test images", done.stdout)
    assert abs(float(share) - float(accuracy)) < 0.6


def test_export_refuses_a_run_without_checkpoints_of_ddptrain(tmp_path: Path) -> None:
    (tmp_path / "ends.py").touch()
    assert ddpctl("launch", "--name", "plain", "--", "ends.py", cwd=tmp_path).returncode == 0
    done = in_process("export", "plain", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (66, "")
    assert [
        fact for fact in ("'plain'", "ends.py", f"{tmp_path}/runs/plain/checkpoints") if fact not in done.stderr
    ] == []
    for arguments, code in ((("plain", "weights.bin"), 2), (("other",), 66)):
        done = in_process("export", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
    assert not (tmp_path / "weights.pt").exists()
