"""Programs whose standard streams are closed, or full: no file of theirs may take the streams' numbers."""

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests import forks


@pytest.mark.parametrize("where", ["closed", "full"])
def test_a_training_without_stdout_saves(tmp_path: Path, where: str) -> None:
    argv = ["-m", "ddptrain", "--epochs", "1", "--checkpoint-dir", f"{tmp_path}/saved"]
    if where == "closed":
        command = shlex.join([sys.executable, *argv])
        done = subprocess.run(
            ["/bin/sh", "-c", f"exec {command} >&-"], capture_output=True, text=True, timeout=120, check=False
        )
    else:
        with Path("/dev/full").open("w") as full:
            done = forks.run(argv, env=os.environ, stdout=full, text=True, timeout=120)
    assert done.returncode == 0
    assert (os.strerror(errno.ENOSPC) in done.stderr) == (where == "full")
    assert (tmp_path / "saved/step-00000045.pt").exists()


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_a_node_without_streams_is_a_node(tmp_path: Path, closed: str) -> None:
    (tmp_path / "ok.py").write_text("print('hello')\n")
    command = f"exec {sys.executable} -m ddprun --exec --run-dir {tmp_path}/run {tmp_path}/ok.py {closed}"
    assert subprocess.run(["/bin/sh", "-c", command], timeout=90, check=False).returncode == 0
    assert (tmp_path / "run/node-0/rank-0.log").read_text() == "hello\n"
