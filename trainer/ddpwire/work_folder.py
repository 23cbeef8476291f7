"""The temporary folder of a rehearsal, which is made and removed on the machine that rehearses."""

import fcntl
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX, PLAN = "ddpctl-rehearse-", "plan.json"
END_S, POLL_S = 10.0, 0.1  # for processes that are being killed


@contextmanager
def work_folder(plan: Mapping[str, Any]) -> Iterator[Path]:
    """Make a temporary folder with the plan in it, and remove it at the end, with those of processes that were killed.

    The lock of a plan shows that its owner is alive. Raises OSError.
    """
    work = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (work / PLAN).open("w") as own:
            fcntl.flock(own, fcntl.LOCK_EX)
            own.write(json.dumps({"work": str(work), **plan}))
            own.flush()
            for path in work.parent.glob(f"{PREFIX}*/{PLAN}"):
                with suppress(OSError), path.open() as abandoned:
                    fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if abandoned.read(1):  # else its owner is about to lock it
                        shutil.rmtree(path.parent, ignore_errors=True)
            yield work
    finally:
        deadline = time.monotonic() + END_S
        while work.exists() and time.monotonic() < deadline:  # after Ctrl-C, ranks are about to end
            shutil.rmtree(work, ignore_errors=True)
            time.sleep(POLL_S * work.exists())
