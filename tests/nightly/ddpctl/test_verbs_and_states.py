"""All verbs in the states in which tests/contract/ddpctl tries only some of them."""

from collections.abc import Callable

import pytest
from tests.contract.ddpctl.conftest import world as world
from tests.contract.ddpctl.test_verbs_and_states import ALL_VERBS_IN, TABLE, VERBS, try_verbs
from tests.contract.ddpctl.worlds import World

REST = [(kind, state) for kind, states in TABLE.items() for state in states if state not in ALL_VERBS_IN]


@pytest.mark.parametrize(("kind", "state"), REST)
def test_every_verb_in_this_state(kind: str, state: str, world: Callable[[str], World]) -> None:
    try_verbs(world(kind), kind, state, [*VERBS])
