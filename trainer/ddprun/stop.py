"""How ranks are told to end: a signal, a grace, SIGKILL. Whoever asks, the ranks hear of it once."""

import signal
import threading
import time
from collections.abc import Callable

from ddprun.errors import NodeError
from ddprun.ranks import Ranks
from ddpwire.exits import worth_a_retry
from ddpwire.outcome import Outcome

POLL_S = 0.01


def before_the_ranks(number: int, node: int) -> Outcome:
    """The outcome of a stop that came while there was nobody to be told."""
    code, name = 128 + number, signal.Signals(number).name
    message = f"stopped by {name} before the ranks had started"
    return Outcome(code=code, cause="stopped", message=message, node=node, retry=worth_a_retry(code))


class Stop:
    """Whether this node was asked to stop, and what its ranks have been told."""

    def __init__(self, ranks: Ranks, *, node: int, grace_s: float, say: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._node = node
        self._grace_s = grace_s
        self._say = say
        self._told = 0  # what the ranks of this attempt were told to end by
        self._deadline = 0.0
        self.starting = threading.Lock()  # held while ranks are being started: those of an attempt are told together
        self.requested = 0  # the signal that asked this node to stop; 0: none
        self.passed_on = 0  # the last signal that the ranks were told by anybody's wish
        self.killed = False  # whether their grace was over

    def request(self, number: int) -> None:
        """Somebody asks this node to stop: at first with grace, then at once."""
        name = signal.Signals(number).name
        if self.requested:
            self._say(f"{name} again: the ranks are killed")
            self._kill()
            return
        self.requested = self.passed_on = number
        self._say(f"{name}: the ranks have {self._grace_s:g} s to end")
        with self.starting:
            self._tell(number, self._grace_s)
        timer = threading.Timer(self._grace_s, self._kill)
        timer.daemon = True
        timer.start()

    def pass_on(self, number: int) -> None:
        """Give a signal to the ranks, whatever they make of it: a save, a dump, an end."""
        self.passed_on = number
        with self.starting:
            self._ranks.signal(number)

    def check(self) -> None:
        """Raise NodeError when a stop was asked for."""
        if self.requested:
            raise NodeError(before_the_ranks(self.requested, self._node))

    def new_attempt(self) -> None:
        """The next ranks have been told nothing."""
        self._told = 0
        self.passed_on = self.requested

    def end_ranks(self, grace_s: float) -> None:
        """Have no rank left, after ``grace_s`` or what is left of the grace that they were given before."""
        if not self._told:
            self._tell(signal.SIGTERM, grace_s)
        while self._ranks.alive and time.monotonic() < self._deadline:
            time.sleep(POLL_S)
        self._ranks.clear()

    def _tell(self, number: int, grace_s: float) -> None:
        if not self._told:
            self._told = number
            self._deadline = time.monotonic() + grace_s
            self._ranks.signal(number)

    def _kill(self) -> None:
        self.killed = True
        self._ranks.clear()
