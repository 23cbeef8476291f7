"""What of a rank's last words is shown at once, and what waits for the verdict. Pure; the rank's file has it all.

When one rank fails, its peers lose their connections and each prints a traceback about it, before anybody knows who was
first: seven of eight tracebacks are echoes, and they bury the one. So from the line on that begins a crash a rank's
lines are held back from the console. The verdict lets go of those of the rank that is to blame, right before the
reason, and leaves the others' in their files. Where no verdict comes in time, the script caught its error, or several
ranks have: nothing is lost, and all is shown. Before a crash nothing is held, and nothing at all when a run is stopped.
"""

import re

HOLD_S = 8.0  # a rank may take 2 s to exit after its traceback, and its verdict 2 s more; machines are busy
MOST_LINES = 2000  # a rank that says so much is no rank that dies
BEGINS = re.compile(rb"(\[rank\d+\]: ?)?(Traceback \(most recent call last\):|terminate called )|\[rank\d+\]:\[E")


class Manners:
    """One rank's lines, on their way to the console."""

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._until: float | None = None  # None: nothing is held
        self._silenced = self._judged = False
        self.num_left_out = 0

    def hear(self, lines: list[bytes], now: float) -> list[bytes]:
        """Those of them that may be shown at once."""
        if self._silenced:
            self.num_left_out += len(lines)
            return []
        if self._judged:
            return lines
        if self._until is None:
            first = next((number for number, line in enumerate(lines) if BEGINS.match(line)), None)
            if first is None:
                return lines
            self._until = now + HOLD_S
            self._held = lines[first:]
            return lines[:first]
        self._held += lines
        return self.due(now)

    def due(self, now: float) -> list[bytes]:
        """What was held for long enough."""
        if self._until is not None and (now > self._until or len(self._held) > MOST_LINES):
            return self._let_go()
        return []

    def _let_go(self) -> list[bytes]:
        held, self._held, self._until = self._held, [], None
        return held

    def silence(self) -> None:
        """What was held, and what is still to come, is an echo."""
        self.num_left_out += len(self._let_go())
        self._silenced = True

    def acquit(self) -> list[bytes]:
        """What was held; from now on nothing is, unless it was silenced before."""
        self._judged = True
        return self._let_go()

    @property
    def holds(self) -> bool:
        """Whether something is held."""
        return self._until is not None
