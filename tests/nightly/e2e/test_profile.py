"""A recording of a rank for ddpctl profile, where the script records or forks itself, or exits."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.driver import ROOT

PROFILED = ROOT / "tests/nightly/e2e/scripts/profiled.py"
EXPECTED = {  # what the script does → why ddpctl gets no profile, and whether the recording has the script's operators
    "own_first": ["not recorded, because the script runs its own profiler", False],
    "own_second": ["", True],
    "fork": ["", True],
}


def test_a_profiler_of_the_script_a_fork_and_an_exit_end_a_recording(tmp_path: Path) -> None:
    argv = [sys.executable, str(PROFILED)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout) == EXPECTED
