"""ddpctl with the lowest typer that pyproject.toml allows and with the newest, each without click."""

import os
import re
import subprocess
import sys

import pytest
from tests.e2e.driver import ROOT

(LOWEST,) = re.findall(r'"typer>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
CALL = "import sys; sys.modules['click'] = None; from ddpctl.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize("requirement", [f"typer=={LOWEST}.*", "typer"], ids=["lowest", "newest"])
def test_ddpctl_needs_no_click(requirement, tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path / "typer"),
    ]
    installed = subprocess.run([*install, requirement], capture_output=True, text=True, timeout=120)
    if installed.returncode:
        pytest.skip(f"{requirement} cannot be installed: {installed.stderr}")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "typer"), "HOME": str(tmp_path)}

    def call(*arguments):
        argv = [sys.executable, "-c", CALL, *arguments]
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    imported = subprocess.run(
        [sys.executable, "-c", "import typer; print(typer.__file__)"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert imported.stdout.startswith(str(tmp_path))
    assert call("--version").returncode == 0
    assert call("launch", "--help").returncode == 0
    for wrong in (["nosuch"], ["launch", "--nodes", "x"], ["status", "--nosuch"]):
        refused = call(*wrong)
        assert refused.returncode == 2, refused.stderr
        assert "Traceback" not in refused.stderr
    assert call("ps", "--json").stdout == "[]\n"
