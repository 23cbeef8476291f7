"""One fault of each class on two machines of two ranks each (docs/results/faults.md; the others: tests/nightly/faults).

The faults are those of the benchmark (bench/fault_injection/rows.py). Each test also compares the weights with those of
an undisturbed run, looks for processes that are left, and checks the outcome, the exit code and the counters of each
node. It does not judge the seconds, because they depend on what else runs on the machine.

explain names a link whose packets do not arrive, and no rank. Ranks of one machine: e2e.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_injection.experiment import undisturbed
from fault_injection.result import violations
from fault_injection.rows import ROWS, Row, try_fault
from tests.cluster import replaced_nodes
from tests.cluster.replaced_nodes import MISSING

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(600)]
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


def test_survivor_goes_on_with_the_successor_of_a_lost_node(
    tmp_path: Path, once: Callable[[str, Callable[[], str]], str]
) -> None:
    """The successor has another address; tests/nightly/faults replaces more nodes in more ways."""
    weights = once("replaced-80", lambda: replaced_nodes.undisturbed(tmp_path / "calm", 80))
    replaced_nodes.replace_nodes(signal.SIGKILL, [1, 0], 80, tmp_path, weights)
