"""Tests of ddptrain with ranks as processes (tests/ranks.py)."""

from tests.ranks import start, train
from tests.unit.ddptrain.conftest import no_network, one_thread

__all__ = ["no_network", "one_thread", "start", "train"]
