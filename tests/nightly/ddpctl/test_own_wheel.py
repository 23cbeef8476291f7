"""The wheel of ddpctl that travels in a notebook, where the launcher's libraries are missing."""

import base64
import lzma
import os
import subprocess
import sys
from pathlib import Path

from ddpctl.files.own_wheel import wheel_text
from ddpwire.version import __version__


def test_the_wheel_that_travels_runs_where_the_launchers_libraries_are_not(tmp_path: Path) -> None:
    """As on Kaggle without a network: typer, pydantic, fabric and paramiko may be missing, or old."""
    assert len(wheel_text()) < 700_000  # Kaggle takes a notebook of 1 MB
    again = wheel_text.__wrapped__()
    assert again == wheel_text()
    file = tmp_path / f"ddpctl-{__version__}-py3-none-any.whl"
    file.write_bytes(lzma.decompress(base64.b85decode(wheel_text())))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "site"),
    ]
    subprocess.run([*pip, str(file)], check=True, timeout=120)
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\nsys.modules |= dict.fromkeys(('typer', 'pydantic', 'fabric', 'paramiko', 'annotated_doc'))\n"
    )
    code = "from ddpctl.notebook import launch\nprint(launch(lambda x: x + 1, gpus=1, args=(1,), device='cpu'))"
    env = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["2"]), done.stdout + done.stderr
