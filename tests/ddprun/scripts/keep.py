"""Runs command lines as ranks, forked or executed: [[argv, env], …] as JSON in, [[output, status], …] as JSON out.

Addresses and thread numbers, which differ from process to process, are said as "…".
"""

import json
import os
import queue
import re
import sys
import tempfile

from ddprun import zygote
from ddprun.ranks import Ranks

forks = sys.argv[1] == "fork"
if forks:
    zygote.warm(1)
ranks = Ranks(lock_fd=os.open(os.devnull, os.O_RDONLY), fork=forks)
ends: queue.Queue[tuple[str, int]] = queue.Queue()
plain: list[str] = []
ranks.on_exit = lambda tag, status: ends.put((tag, status))
ranks.on_plain = plain.append
ranks.on_keeper_lost = lambda: None
done = []
for number, (argv, env) in enumerate(json.load(sys.stdin)):
    with tempfile.TemporaryFile() as output:
        pipe_read, pipe_write = os.pipe()
        pid = ranks.start(
            f"1.{number}", [sys.executable, *argv], os.environ | {"PYTHONUNBUFFERED": "1"} | env, pipe_write
        )
        os.close(pipe_write)
        with os.fdopen(pipe_read, "rb") as said:
            text = said.read().decode("utf-8", "replace")
        text = re.sub(r"\b0x[0-9a-f]+|(?<=\b(?:started|stopped|.daemon) )\d+", "…", text)
        done.append((text.replace(str(pid), "PID"), ends.get(timeout=60)[1]))
print(json.dumps([done, plain]))
