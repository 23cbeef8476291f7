"""Progress lines during a long wait: the first after 5 s, then at growing intervals.

The import of torch takes a minute on a busy machine. During the import, ddprun must not have a thread, because it could
not fork safely with one. So a finder in ``sys.meta_path``, which Python calls for every imported module, logs the
lines.
"""

import sys
import time
from collections.abc import Callable
from typing import Any


class Progress:
    """Logs the progress of one wait after 5, 10, 20, 40, 70, 100 … s. The wait begins when the object is created.

    ``with Progress(...)`` logs the progress while the imports in the block are running.
    """

    def __init__(self, log: Callable[[str], None], wait: str) -> None:
        self._log, self._wait = log, wait
        self._started = time.monotonic()
        self._log_at_s = 5.0

    def update(self) -> None:
        """Log how long the wait has lasted, if a line is due."""
        passed_s = time.monotonic() - self._started
        if passed_s >= self._log_at_s:
            self._log_at_s = passed_s + min(passed_s, 30.0)
            self._log(f"{self._wait}, {passed_s:.0f} s so far")

    def __enter__(self) -> None:
        sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        sys.meta_path.remove(self)

    def find_spec(self, *_: Any) -> None:
        """Call ``update``. Return None, so that Python asks the other finders. Python calls this for every import."""
        self.update()
