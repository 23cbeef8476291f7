"""A stop at any moment of a run, as bench/signals.py tries it fifty times; here five."""

import subprocess
import sys

import pytest
from tests.road.driver import ROOT

pytestmark = pytest.mark.slow


def test_sigterm_at_five_random_moments() -> None:
    command = [sys.executable, str(ROOT / "bench" / "signals.py"), "--moments", "5", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "5 of 5: exit code 143, nothing left, within 15 s", done.stdout
