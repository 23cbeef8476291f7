"""Command lines run as ranks of the supervisor: forked, or executed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SUPERVISE = Path(__file__).parent / "scripts" / "supervise.py"


def run_ranks(how: str, lines: list[Any], folder: Path, options: tuple[str, ...] = (), timeout_s: float = 280) -> Any:
    """Return what each of ``lines`` printed and exited with, and why it was executed although it was to be forked."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[3] / "trainer")
    done = subprocess.run(
        [sys.executable, *options, str(SUPERVISE), how],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=timeout_s,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)
