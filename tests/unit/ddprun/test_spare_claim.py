"""The claim of a spare that was paused: node 0 deletes it, and the spare takes it again."""

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch.distributed import HashStore

from ddprun.nodes.rendezvous import FixedRankRendezvous, spare_ends
from ddprun.nodes.spares import Spare
from ddprun.system.errors import NodeError
from ddpwire.exits import Exit

CONFIG = cast(Any, SimpleNamespace(node_rank=2, machine=2, max_nodes=2, spares=1, run_id="night"))


class Waiting:
    """A spare that waits, with its store. ``steps`` are called one by one, as the spare checks for a stop."""

    def __init__(self, *steps: Any) -> None:
        self.store, self.lines = HashStore(), list[str]()
        self.store.set("claim/2", json.dumps({"token": "spare"}))
        rendezvous = object.__new__(FixedRankRendezvous)
        rendezvous._config, rendezvous._claim, rendezvous._log = CONFIG, {"token": "spare"}, self.lines.append
        rendezvous.control = SimpleNamespace(
            check=self.store.check,
            get=self.store.get,
            set=self.store.set,
            compare_set=self.store.compare_set,
            clone=lambda: self.store,
        )
        spare = object.__new__(Spare)
        spare._node = cast(Any, SimpleNamespace(config=CONFIG, route=SimpleNamespace(own="")))
        spare._log, spare._voter, spare._store = self.lines.append, cast(Any, object()), SimpleNamespace(port=1)
        calls = iter((*steps, lambda: self.store.set("place/2", "1")))
        spare._check_stop = lambda: next(calls)()
        self.wait = lambda: spare._wait_at(rendezvous, cast(Any, SimpleNamespace(compare=lambda _: None)))


def test_a_paused_spare_can_be_called_again() -> None:
    waiting = Waiting(lambda: waiting.store.delete_key("claim/2"))
    assert waiting.wait()[0] == 1
    assert len(waiting.lines) == 2, "one line that it waits, one that it counted as lost"
    waiting.store.delete_key("place/2")
    assert spare_ends(waiting.store, CONFIG) == ["ended/2"]
    assert json.loads(waiting.store.get("claim/2")) == {"token": "spare"}


def test_a_spare_whose_claim_another_ddprun_has_ends() -> None:
    waiting = Waiting(lambda: waiting.store.set("claim/2", json.dumps({"token": "other"})))
    with pytest.raises(NodeError) as error:
        waiting.wait()
    assert (error.value.code, error.value.outcome.cause) == (Exit.KILLED, "node_lost")
