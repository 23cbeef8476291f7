"""A node without streams."""

import subprocess
import sys
from pathlib import Path


def test_a_node_without_streams_is_a_node(tmp_path: Path) -> None:
    (tmp_path / "ok.py").write_text("print('hello')\n")
    command = f"exec {sys.executable} -m ddprun --exec --run-dir {tmp_path}/run {tmp_path}/ok.py 0<&- 1>&- 2>&-"
    assert subprocess.run(["/bin/sh", "-c", command], timeout=90, check=False).returncode == 0
    assert (tmp_path / "run/node-0/rank-0.log").read_text() == "hello\n"
