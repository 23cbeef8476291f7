"""Each test has one thread of torch, as many as pytest's workers have cores."""

import urllib.request

import pytest
import torch
from tests.ranks import start

from ddptrain import distributed

__all__ = ["start"]


@pytest.fixture(autouse=True)
def one_thread(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread a training: with more than the cores, as pytest's workers share them, each step takes much longer."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(distributed, "usable_cores", lambda: 1)
    torch.set_num_threads(1)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that refuses: what a machine without a network looks like to urllib."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setattr(urllib.request, "_opener", None)  # urlopen keeps the proxies of its first call in a process
