"""One fault of each class on two machines of two ranks each; tests/nightly/faults has the others (docs/faults.md).

The faults are those of the benchmark (bench/fault_injection/rows.py). Each test also compares the weights with those of
an undisturbed run, looks for processes that are left, and checks the outcome, the exit code and the counters of each
node. It does not judge the seconds, because they depend on what else runs on the machine.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_injection.experiment import undisturbed
from fault_injection.result import violations
from fault_injection.rows import ROWS, Row, try_fault

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: machines are network namespaces"),
    pytest.mark.skipif(
        shutil.which("ip") is None or not Path("/proc/self/ns/net").exists(),
        reason="needs Linux and ip (apt install iproute2): machines are network namespaces",
    ),
]
TITLES = (
    "machine 1 is lost, and comes back",
    "the cable of machine 1 is out for 8 s",
    "a rank is frozen (SIGSTOP)",
    "the port is taken",
)


@pytest.fixture
def weights(once: Callable[[str, Callable[[], str]], str], tmp_path: Path) -> str:
    """What an undisturbed run ends with."""
    return once("faults", lambda: undisturbed(tmp_path / "calm"))


@pytest.mark.parametrize("title", TITLES)
def test_fault_ends_as_the_table_says(title: str, tmp_path: Path, weights: str) -> None:
    row: Row = next(row for row in ROWS if row.title == title)
    result = try_fault(row, tmp_path / "run", weights, seed=0)
    assert violations(result, row.bars, timed=False) == ()
