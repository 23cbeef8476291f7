"""The guide to a run's weights: its commands and its Python, from top to bottom, on a real run."""

import os
import re
import shlex
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import ROOT, ddpctl
from tests.wording import Wording

pytestmark = pytest.mark.timeout(900)
GUIDE = (ROOT / "docs" / "export.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", GUIDE, re.M | re.S)
(SHELL,) = (block for language, block in FENCES if not language)
LOAD, PREDICT, ONNX, RUN = (block for language, block in FENCES if language == "python")
ACCURACY = re.compile(r"test accuracy ([\d.]+) %")


def python(folder: Path, *blocks: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-c", "\n".join(blocks)], cwd=folder, env=os.environ, text=True, timeout=300)


def test_the_guide_from_its_first_command_to_its_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # threads that wait for each other are slow on a busy machine
    printed = []
    for line in SHELL.splitlines():
        done = ddpctl(*shlex.split(line, comments=True)[1:], cwd=tmp_path, timeout=500)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    (as_exported,) = ACCURACY.findall(printed[1])
    assert (tmp_path / "weights.safetensors").stat().st_size > 100_000
    # Predictions in float32 may differ in an image, or two of 360, from those of the training.
    # And what torch.onnx begins with, which needs no package.
    program = "torch.export.export(classifier, (images[:2],), dynamic_shapes=({0: torch.export.Dim('batch')},))"
    done = python(tmp_path, LOAD, PREDICT, f"print({program}.module()(images[:5]).shape)")
    assert done.returncode == 0, done.stderr
    assert abs(float(ACCURACY.findall(done.stdout)[0]) - float(as_exported)) < 0.6
    assert done.stdout.splitlines()[-1:] == ["torch.Size([5, 10])"], done.stderr
    done = python(tmp_path, LOAD, PREDICT, ONNX)
    if not find_spec("onnxscript"):  # no development dependency: it brings 40 MB
        assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'onnxscript'"
        return
    assert done.returncode == 0, done.stderr
    if find_spec("onnxruntime"):
        done = python(tmp_path, LOAD, PREDICT, RUN)
        assert done.returncode == 0, done.stderr
        (share,) = re.findall(r"([\d.]+)% of 360 test images", done.stdout)
        assert abs(float(share) - float(as_exported)) < 0.6


def test_a_run_without_checkpoints_of_ours_and_one_that_is_not_there(tmp_path: Path, wording: Wording) -> None:
    (tmp_path / "ends.py").touch()
    assert ddpctl("launch", "--name", "plain", "--", "ends.py", cwd=tmp_path).returncode == 0
    done = ddpctl("export", "plain", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (66, "")
    wording(done.stderr)
    done = ddpctl("export", "plain", "weights.bin", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    done = ddpctl("export", "other", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (66, "")
    assert not (tmp_path / "weights.pt").exists()
