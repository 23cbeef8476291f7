"""ddptrain in a real process answers each signal that a run may send it, by saving and ending."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.messages import assert_names

from ddprun.settings.node_config import STOP_SIGNALS


@pytest.mark.parametrize("number", STOP_SIGNALS.values(), ids=STOP_SIGNALS)
def test_each_stop_signal_of_a_run_saves_and_ends_a_training(
    start: Callable, tmp_path: Path, number: signal.Signals
) -> None:
    world = start("--epochs", "50")
    world.wait_for("epoch  1/50")
    world.ranks[0].send_signal(number)
    (ended,) = world.end()
    newest = max((tmp_path / "checkpoints").glob("step-*.pt")).name
    assert (ended.code, ended.err) == (128 + number, "")
    assert_names(ended.out.splitlines()[-1], number.name, int(newest[5:13]), newest)
