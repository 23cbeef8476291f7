"""Command lines run as ranks of a keeper: forked, or executed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KEEP = Path(__file__).parent / "scripts" / "keep.py"


def keep(how: str, lines: list[Any], folder: Path, options: tuple[str, ...] = ()) -> Any:
    """What each of ``lines`` said and ended with, and why it was executed although it was to be forked."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2] / "trainer")
    done = subprocess.run(
        [sys.executable, *options, str(KEEP), how],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)
