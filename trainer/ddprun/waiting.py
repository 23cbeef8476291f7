"""One wait for other nodes: its limit, and what a person hears of it meanwhile."""

import time
from collections.abc import Callable

from ddprun.contract import Contract

PROGRESS_S = 5.0


class Wait:
    """One wait for other nodes: its limit, its progress line."""

    def __init__(
        self,
        contract: Contract,
        extra_s: float,
        say: Callable[[str], None],
        check_stop: Callable[[], None],
        pause: Callable[[str], None],
    ) -> None:
        self._contract, self._say, self._check_stop, self._pause = contract, say, check_stop, pause
        self._started = time.monotonic()
        self._limit_s = contract.join_timeout_s + extra_s
        self._say_at_s = PROGRESS_S

    @property
    def passed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        """Until it is over."""
        return max(0.0, self._limit_s - self.passed_s)

    def is_over(self, missing: tuple[int, ...], why: str = "", key: str = "") -> bool:
        """Whether the limit has passed; else sleep a little, saying now and then who is ``missing``.

        The sleep ends when ``key`` comes.
        """
        self._check_stop()
        if self.passed_s >= self._limit_s:
            return True
        if missing and self.passed_s >= self._say_at_s:
            self._say_at_s += PROGRESS_S
            reason = f" ({why})" if why else ""
            self._say(f"waiting for {who(missing)}: {self.passed_s:.0f} of {self._limit_s:g} s{reason}")
        self._pause(key)
        return False


def who(nodes: tuple[int, ...]) -> str:
    """The nodes as a person says it."""
    *most, last = map(str, nodes)
    return f"nodes {', '.join(most)} and {last}" if most else f"node {last}"
