"""Whether to stop now, and why: a signal, the time that was given, a step that was not finite. Agreed by all ranks."""

import time

from ddptrain.guard import Guard
from ddptrain.place import Place
from ddpwire.exits import Exit
from ddpwire.signals import Signals
from ddpwire.vote import Vote

NOT_FINITE = 1 << 10  # above all exit codes, so that it wins the vote


class Stop:
    """To be asked by every rank after every step."""

    def __init__(self, place: Place, signals: Signals, guard: Guard, *, after_s: float, started: float) -> None:
        self.timed_out = False  # this rank's time was over, and no signal came before
        self._place = place
        self._signals = signals
        self._guard = guard
        self._deadline = started + after_s if after_s else None
        self._vote = Vote() if place.size > 1 else None

    def ask(self) -> int:
        """The code that all ranks agree to stop with; 0: go on. NOT_FINITE is for ``Guard.prove`` to explain."""
        code = self._signals.code
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.timed_out = not code
            code = max(code, Exit.SAVED_TERM)
        if self._guard.seen:
            code = NOT_FINITE
        return self._vote.ask(code) if self._vote else code

    @property
    def told(self) -> int | None:
        """The rank that was told to stop, once all have agreed to; None: none was, the time was over."""
        if self.timed_out:
            return None
        return self._vote.asker if self._vote else self._place.rank

    @property
    def told_another(self) -> int | None:
        """The same, if this rank itself was told nothing."""
        return None if self._signals.code else self.told

    def close(self) -> None:
        """Read the last answer, before the ranks part."""
        if self._vote:
            self._vote.answer()
