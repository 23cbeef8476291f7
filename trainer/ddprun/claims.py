"""A node's place in its run, which one ddprun at a time may have; and how one that comes later finds its way in.

``claim/NODE`` in the control store is what the ddprun that has the place says of itself. Node 0 takes back the claim of
a node that has fallen silent (roll.py); whoever finds the place taken waits for that, unless its owner lives.
"""

import json
import uuid
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but torch does not say so

from ddprun.errors import bad_contract, refused
from ddpwire.exits import Exit


class Claim:
    """The place of node ``node``."""

    def __init__(self, control: Store, node: int, said: dict[str, str]) -> None:
        """``said`` is what all nodes must agree on, or shall know of this one."""
        self._control = control
        self._node = node
        self._said = {"token": uuid.uuid4().hex} | said

    def take(self, is_over: Callable[[str], bool]) -> None:
        """Have the place; ``is_over`` sleeps a little, or says that it was long enough. Raises NodeError."""
        heard = self._beat()
        while not self._is_ours():
            if heard != self._beat():
                raise bad_contract(f"another node says that it is node {self._node}: give each its own --node-rank")
            if is_over("another ddprun was in this place, and is not given up yet"):
                message = f"another ddprun is in the place of node {self._node}: it is silent, but was not given up"
                raise refused(Exit.ABSENT, "absent", message, node=self._node)
        # The first beat: should this ddprun end before it has another, node 0 hears its silence.
        self._control.set(f"beat/{self._node}", json.dumps({"by": self._said["token"], "attempt": 0, "signs": []}))

    def keep(self) -> None:
        """Have the place still, or again. Raises NodeError."""
        if not self._is_ours():
            message = f"this ddprun was silent for too long: another has taken its place as node {self._node}"
            raise refused(Exit.KILLED, "node_lost", message, node=self._node)

    def _is_ours(self) -> bool:
        known = json.loads(self._control.compare_set(f"claim/{self._node}", "", json.dumps(self._said)))
        return bool(known["token"] == self._said["token"])

    def _beat(self) -> bytes:
        """What the owner of the place said last; it lives as long as that changes."""
        key = f"beat/{self._node}"
        return bytes(self._control.get(key)) if self._control.check([key]) else b""


def next_attempt(control: Store, attempt: int, *, leads: bool) -> int:
    """The attempt for which the nodes gather, or will gather, when this node's last was ``attempt``."""
    if leads:
        control.set("attempt", str(attempt + 1))
    elif control.check(["attempt"]):
        latest = int(control.get("attempt"))
        return max(attempt + 1, latest + control.check([f"{latest}/group"]))
    return attempt + 1
