"""Each test has a target on this machine, and fails if a process of its runs outlives it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.contract.ddpctl.worlds import WORLDS, World

from ddpctl.commands import explain
from ddpctl.operations import launcher, lost_replies


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[str], World]]:
    """Make the world of a kind of target."""
    worlds = []

    def make(kind: str) -> World:
        worlds.append(WORLDS[kind](tmp_path, monkeypatch, capfd))
        return worlds[-1]

    monkeypatch.setattr(launcher, "SILENT_S", 0.0)
    monkeypatch.setattr(lost_replies, "ANSWER_GAP_S", 0.2)
    monkeypatch.setattr(explain, "ANSWER_S", 2.0)
    yield make
    for made in worlds:
        try:
            made.wait_for(made.is_over, timeout_s=10)
        finally:
            made.close()
