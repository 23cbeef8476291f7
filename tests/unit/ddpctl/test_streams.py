"""Where the output goes nowhere, and where Ctrl-C comes before there is anything to say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.ddpctl.test_run_store import make

DDPCTL = (sys.executable, "-P", "-m", "ddpctl")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs, of which one has a log."""
    run = make(tmp_path / "runs", "night", 1.0)
    node = Path(run.folder) / "node-0"
    node.mkdir()
    (node / "node.log").write_text("a line\n")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "runs"))
    return tmp_path


VERBS = (("ps",), ("logs",), ("top", "--once"))


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_full_disk_is_one_line_and_73(root: Path, verb: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*DDPCTL, *verb], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (73, 1)
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_closed_pipe_is_no_failure(root: Path, verb: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*DDPCTL, *verb], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("module", ["typer", "rich"])
def test_ctrl_c_at_the_beginning_is_silent(root: Path, module: str) -> None:
    (root / f"{module}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    process = subprocess.Popen(
        [*DDPCTL, "top", "--once"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 130)
