"""A stop at any moment of a run, as bench/signals.py tries it fifty times; here five."""

import subprocess
import sys

import pytest
from tests.e2e.driver import ROOT
from tests.wording import Wording

pytestmark = pytest.mark.e2e


def test_sigterm_at_five_random_moments(wording: Wording) -> None:
    command = [sys.executable, str(ROOT / "bench" / "signals.py"), "--moments", "5", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *tries, last = done.stdout.splitlines()[1:]
    assert len(tries) == 5
    wording(last)
