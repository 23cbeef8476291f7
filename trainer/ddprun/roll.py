"""What node 0 hears of the nodes: who lives, and how their ranks do.

A node whose ``beat/NODE`` has not changed for long is lost: its claim is taken back, so that a ddprun that is started
in its place finds the way in. Silence is counted in what node 0 heard itself: if it was kept from running, nobody was
silent meanwhile.
"""

import json
from dataclasses import dataclass

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but torch does not say so

from ddprun.pulse import Sign
from ddprun.verdict import LOST_S

BEAT_S = 0.25


@dataclass(kw_only=True)
class Heard:
    """What was last heard of a node."""

    said: bytes = b""
    silent_s: float = 0.0
    num_changes: int = 0
    changes_at_failure: int = 0
    is_lost: bool = False


class Roll:
    """The nodes as node 0 hears them."""

    def __init__(self, store: Store, max_nodes: int) -> None:
        self._store = store
        self._nodes = {node: Heard() for node in range(max_nodes)}
        self._attempt = 0
        self._members: tuple[int, ...] = ()
        self._listened_at = 0.0
        self.signs: tuple[Sign, ...] = ()  # of all ranks of the attempt
        self.step: int | None = None  # the highest in the attempt

    def begin(self, attempt: int, members: tuple[int, ...]) -> None:
        """Enter an attempt. Its members have just been here."""
        self._attempt, self._members = attempt, members
        self.signs, self.step = (), None
        for node in members:
            self._nodes[node].silent_s = 0.0

    def failure(self) -> None:
        """A failure was heard of: who is heard of from now on is alive after it."""
        for heard in self._nodes.values():
            heard.changes_at_failure = heard.num_changes

    def all_heard_since_failure(self) -> bool:
        """Whether each other member was heard of twice: the first may have been on its way before."""
        others = (self._nodes[node] for node in self._members if node)
        return all(heard.num_changes >= heard.changes_at_failure + 2 for heard in others)

    @property
    def silent_s(self) -> dict[int, float]:
        """For how long nothing was heard of each other member."""
        return {node: self._nodes[node].silent_s for node in self._members if node}

    def listen(self, now_s: float) -> None:
        """Hear what all nodes have said. Called every BEAT_S."""
        passed_s = min(now_s - self._listened_at, 2 * BEAT_S)
        self._listened_at = now_s
        signs: list[Sign] = []
        for node, heard in self._nodes.items():
            said = self._store.get(f"beat/{node}") if self._store.check([f"beat/{node}"]) else b""
            if said != heard.said:
                heard.said, heard.silent_s, heard.is_lost = said, 0.0, False
                heard.num_changes += 1
            elif node and said:
                heard.silent_s += passed_s
            if heard.silent_s > LOST_S and not heard.is_lost:
                heard.is_lost = True
                self._store.delete_key(f"claim/{node}")
            if said and not heard.is_lost:
                told = json.loads(said)
                signs += (Sign(**sign) for sign in told["signs"] if told["attempt"] == self._attempt)
        self.signs = tuple(signs)
        steps = [sign.step for sign in signs if sign.step is not None]
        self.step = max((*steps, *(() if self.step is None else (self.step,))), default=None)
