"""Without the private interfaces of CPython and prometheus_client: the plain fallbacks."""

import atexit
import runpy
import threading
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.messages import refused
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.torch_version import TorchVersion

from ddprun.nodes.rendezvous import FixedRankRendezvous
from ddprun.ranks import fork_server
from ddprun.system import compat
from ddprun.system.errors import NodeError
from ddpwire.exits import Exit


@pytest.mark.parametrize(("module", "name"), compat.FORK_NAMES, ids=lambda value: getattr(value, "__name__", value))
def test_a_python_without_a_private_name_executes_ranks(module, name, monkeypatch, tmp_path):
    assert compat.missing_for_fork() == ""
    assert {module for module, _ in compat.FORK_NAMES} == {runpy, threading, atexit}
    monkeypatch.delattr(module, name)
    assert fork_server.fork_obstacle(["python", "x.py"], str(tmp_path)).endswith(f"{module.__name__}.{name}")


def test_the_oldest_torch_is_that_of_the_package() -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch>={compat.MIN_TORCH}" in extras["train"]
    assert not [requirement for requirement in extras["agent"] if requirement.startswith("torch")]


def test_a_script_may_have_hooks_of_its_own_for_the_steps_of_optimizers() -> None:
    """torch iterates over all hooks while it calls them: a hook that removes itself would end the script."""
    calls: list[str] = []
    compat.before_steps(lambda _: calls.append("ddprun"))
    own = register_optimizer_step_pre_hook(lambda *_: calls.append("script"))
    try:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            optimizer.step()
    finally:
        own.remove()
    assert calls == 2 * ["ddprun", "script"]


def test_the_samples_of_each_batch_and_the_end_of_an_epoch_are_seen() -> None:
    batches: list[tuple[int, object]] = []
    ends: list[int] = []
    loader = torch.utils.data.dataloader
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_next_index", "__next__", "_reset"):
            patch.setattr(loader._BaseDataLoaderIter, name, getattr(loader._BaseDataLoaderIter, name))
        compat.watch_batches(lambda epoch, indices: batches.append((epoch, indices)), ends.append)
        for _ in range(2):
            for _ in torch.utils.data.DataLoader([10, 11, 12], batch_size=2):
                pass
    assert batches == [(0, [0, 1]), (0, [2]), (1, [0, 1]), (1, [2])]
    assert ends == [0, 1]


@pytest.mark.parametrize(
    ("version", "code"),
    [("2.9.1", Exit.CONFIG), ("2.6.0+cu124", Exit.CONFIG), ("2.10.0", None), ("2.10.0+cu126", None), ("3.0.0", None)],
)
def test_only_a_torch_that_is_too_old_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, code: Exit | None
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    with refused(NodeError, code=code) if code else nullcontext():
        compat.check_torch()


def test_whether_ranks_have_met_is_unknown_where_the_store_does_not_list_its_keys() -> None:
    class Unable:
        def list_keys(self) -> list[str]:
            raise NotImplementedError

    node = object.__new__(FixedRankRendezvous)
    answers = []
    for store in (Unable(), object(), SimpleNamespace(list_keys=lambda: ["x"])):
        node._attempt_store = cast(Any, store)
        answers.append(node.ranks_have_met())
    assert answers == [None, None, True]
