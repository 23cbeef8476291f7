"""Records what a rank does for some seconds: torch's profile of all threads, and samples of the main thread's stack.

torch has one profiler per process, and a second one crashes the process with SIGSEGV. So nothing is recorded while the
script's own profiler is ready to start or running. A recording ends early when the script starts a profiler, before a
fork (the child would record forever), and before the process exits.
"""

import atexit
import functools
import itertools
import os
import sys
import threading
import time
import traceback
from typing import Any

from ddprun.system import compat

SAMPLE_INTERVAL_S, END_TIMEOUT_S = 0.02, 10.0
MAX_FRAMES = 24

_own_thread = threading.local()
_end, _is_free = threading.Event(), threading.Event()
_is_free.set()


def end_recording() -> None:
    """If another thread is recording, end its recording. Then wait until torch's profiler is free."""
    if not hasattr(_own_thread, "records"):
        _end.set()
        _is_free.wait(END_TIMEOUT_S)


@functools.cache
def _watch_script() -> None:
    os.register_at_fork(before=end_recording)
    atexit.register(end_recording)
    compat.before_profiler(end_recording)


def record(trace: str, seconds: float) -> dict[str, Any]:
    """Record for ``seconds``, write a Chrome trace into the file ``trace``, and return the time span and the samples.

    Times are in seconds since the epoch. A stack begins with the innermost frame. If nothing is recorded, the result
    has only the key ``unknown`` with the reason.
    """
    _watch_script()
    _own_thread.records = True
    _end.clear()
    _is_free.clear()
    try:
        if compat.has_profiler():
            return {"unknown": "not recorded, because the script runs its own profiler"}
        began, samples = time.time(), []
        with compat.profile_all_threads() as recording:
            while time.time() < began + seconds and not _end.wait(SAMPLE_INTERVAL_S):
                samples.append((time.time(), _main_stack()))
            ended = time.time()
    finally:
        _is_free.set()
    recording.export_chrome_trace(trace)
    return {"began": began, "ended": ended, "samples": samples}


def _main_stack() -> list[tuple[str, int, str]]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001 (it is documented)
    stack = itertools.islice(traceback.walk_stack(frame), MAX_FRAMES) if frame else ()
    return [(one.f_code.co_filename, line, one.f_code.co_name) for one, line in stack]
