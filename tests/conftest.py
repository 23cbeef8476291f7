"""What every test gets: a clean environment, so that no unit test can reach a real cluster or a person's runs."""

import os
import sys
from pathlib import Path

import pytest

KEPT = ("HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "CI", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No PATH but the interpreter's, no variable of a launcher, runs under the test's own folder."""
    for name in list(os.environ):
        if name not in KEPT and not name.startswith("PYTEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.endswith(("cli", "trainer"))))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a test has recorded under ``took``: seconds that are asked for, and not asserted on a busy machine."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "took":
                terminalreporter.write_line(f"{report.nodeid}: {value}")
