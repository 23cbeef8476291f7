"""Without the private interfaces of CPython and prometheus_client: the plain fallbacks."""

import atexit
import runpy
import threading

import pytest

from ddprun.ranks import fork_server
from ddprun.system import compat


@pytest.mark.parametrize(("module", "name"), compat.FORK_NAMES, ids=lambda value: getattr(value, "__name__", value))
def test_a_python_without_a_private_name_executes_ranks(module, name, monkeypatch, tmp_path):
    assert compat.missing_for_fork() == ""
    assert {module for module, _ in compat.FORK_NAMES} == {runpy, threading, atexit}
    monkeypatch.delattr(module, name)
    assert fork_server.fork_obstacle(["python", "x.py"], str(tmp_path)).endswith(f"{module.__name__}.{name}")
