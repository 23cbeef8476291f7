"""Progress lines during a long wait: the first after 5 s, then at growing intervals.

The import of torch takes a minute on a busy machine. During the import, ddprun must not have a thread, because it could
not fork safely with one. So a finder in ``sys.meta_path``, which Python calls for every imported module, logs the
lines.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

FIRST_LINE_S = 5.0
MAX_INTERVAL_S = 30.0


class Progress:
    """Logs the progress of one wait after 5, 10, 20, 40, 70, 100 … s. The wait begins when the object is created."""

    def __init__(self, log: Callable[[str], None], what: str) -> None:
        self._log, self._what = log, what
        self._started = time.monotonic()
        self._log_at_s = FIRST_LINE_S

    def update(self) -> None:
        """Log how long the wait has lasted, if a line is due."""
        passed_s = time.monotonic() - self._started
        if passed_s >= self._log_at_s:
            self._log_at_s = passed_s + min(passed_s, MAX_INTERVAL_S)
            self._log(f"{self._what}, {passed_s:.0f} s so far")

    def find_spec(self, *_: Any) -> None:
        """Call ``update``. Return None, so that Python asks the other finders. Python calls this for every import."""
        self.update()


@contextmanager
def import_progress(log: Callable[[str], None], what: str) -> Iterator[None]:
    """Log progress while the imports in the block are running."""
    progress = Progress(log, what)
    sys.meta_path.insert(0, progress)
    try:
        yield
    finally:
        sys.meta_path.remove(progress)
