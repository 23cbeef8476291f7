"""The connection to the store of an attempt: on a busy machine with many nodes, it takes longer than usual."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import DistStoreError

from ddprun.nodes import rendezvous
from ddprun.nodes.rendezvous import CONNECT_TRIES, FixedRankRendezvous
from ddprun.system import stores
from ddprun.system.errors import NodeError


def connect(monkeypatch: pytest.MonkeyPatch, *, num_failures: int, is_lost: bool = False) -> tuple[Any, list[int]]:
    """Connect to a store that does not answer ``num_failures`` times. Return it, or the error, and the ports tried."""
    tried: list[int] = []

    def answer(_: str, port: int, *, is_quick: bool) -> str:
        tried.append(port)
        if len(tried) <= num_failures:
            raise DistStoreError("timed out")
        return "the store"

    node = object.__new__(FixedRankRendezvous)
    node._config = cast(Any, SimpleNamespace(spares=0, replaces_node_0=False, master_port=1))
    monkeypatch.setattr(stores, "connect", answer)
    monkeypatch.setattr(node, "is_store_lost", lambda: is_lost)
    monkeypatch.setattr(node, "_route", SimpleNamespace(), raising=False)
    monkeypatch.setattr(rendezvous, "replace", lambda config, **_: config)
    monkeypatch.setattr(rendezvous.joining, "why_unreachable", lambda *_: "")
    try:
        return node._connect_to_attempt("127.0.0.1", 7), tried
    except NodeError as error:
        return error.outcome.code, tried


def test_node_0_that_answers_late_is_not_lost_and_one_that_never_answers_ends_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert connect(monkeypatch, num_failures=CONNECT_TRIES - 1) == ("the store", [7] * CONNECT_TRIES)
    assert connect(monkeypatch, num_failures=99) == (137, [7] * CONNECT_TRIES)
    assert connect(monkeypatch, num_failures=99, is_lost=True) == (137, [7])


def test_node_0_that_is_lost_while_a_node_claims_its_number_ends_the_node_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: object) -> None:
        raise stores.StoreError("reset by peer")

    monkeypatch.setattr(FixedRankRendezvous, "_join", lambda *_: None)
    monkeypatch.setattr(FixedRankRendezvous, "_claim_node", lose)
    facts = {"master_addr": "127.0.0.1", "master_port": 1, "node_rank": 1, "max_nodes": 2, "join_timeout_s": 9.0}
    config = SimpleNamespace(run_id="night", secret=b"", is_spare=False, **facts)
    node = SimpleNamespace(config=config, route=None, journal=SimpleNamespace(log=print))
    with pytest.raises(NodeError) as error:
        FixedRankRendezvous(cast(Any, node), cast(Any, None), lambda: None)
    assert (error.value.code, error.value.outcome.cause, error.value.outcome.node) == (137, "node_lost", 0)
