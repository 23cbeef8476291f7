"""What a person hears of a wait that has no news: a line after 5 s, then ever more rarely.

While torch is imported ddprun may not have a thread (its fork would lack it), and on a busy machine that takes a
minute. So the import is listened to: Python asks ``sys.meta_path`` for each module, and who is asked can say something.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIRST_S = 5.0
RAREST_S = 30.0


class Progress:
    """The lines of one wait, which began just now: after 5, 10, 20, 40, 70, 100 … s."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._say, self._what = say, what
        self._started = time.monotonic()
        self._say_at_s = FIRST_S

    def look(self) -> None:
        """Say how long it has been, if that is due."""
        passed_s = time.monotonic() - self._started
        if passed_s >= self._say_at_s:
            self._say_at_s = passed_s + min(passed_s, RAREST_S)
            self._say(f"{self._what}, {passed_s:.0f} s so far")


class _Listener:
    """Finds no module, and hears of each."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def find_spec(self, *_: Any) -> None:
        """Python asks for a module."""
        self._progress.look()


@contextmanager
def of_imports(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say now and then that the imports within still go on."""
    listener = _Listener(Progress(say, what))
    sys.meta_path.insert(0, listener)
    try:
        yield
    finally:
        sys.meta_path.remove(listener)
