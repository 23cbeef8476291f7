"""A lost machine is replaced by one with another address; tests/nightly/faults replaces more nodes in more ways."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cluster.replaced_nodes import MISSING, replace_nodes, undisturbed

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING), pytest.mark.timeout(600)]
STEPS = 80


def test_survivor_goes_on_with_the_successor_of_a_lost_node(
    tmp_path: Path, once: Callable[[str, Callable[[], str]], str]
) -> None:
    weights = once(f"replaced-{STEPS}", lambda: undisturbed(tmp_path / "calm", STEPS))
    replace_nodes(signal.SIGKILL, [1, 0], STEPS, tmp_path, weights)
