"""Runs command lines as ranks, forked or executed: [[argv, env], …] as JSON in, [[output, status], …] as JSON out.

Addresses and thread numbers, which differ from process to process, are said as "…".
"""

import json
import os
import queue
import re
import sys
import tempfile
import threading

from ddprun.ranks import fork_server
from ddprun.ranks.workers import Workers

forks = sys.argv[1] == "fork"
threading.excepthook = lambda _: os._exit(70)  # as ddprun's main sets one of its own
if forks:
    fork_server.preload_torch(1)
plain: list[str] = []  # why ranks are executed, not forked


def log(line: str) -> None:
    if "with exec" in line:
        plain.append(line)


workers = Workers([sys.executable, "-"], lock_fd=os.open(os.devnull, os.O_RDONLY), fork=forks, log=log)
ends: queue.Queue[tuple[str, int]] = queue.Queue()
workers.on_exit = lambda tag, status: ends.put((tag, status))
workers.on_supervisor_lost = lambda: None
done = []
for number, (argv, env) in enumerate(json.load(sys.stdin)):
    with tempfile.TemporaryFile() as output:
        pipe_read, pipe_write = os.pipe()
        streams = (os.open(os.devnull, os.O_RDONLY), pipe_write, os.dup(pipe_write))
        pid = workers.start(f"1.{number}", [sys.executable, *argv], os.environ | env, streams)
        for descriptor in streams:
            os.close(descriptor)
        with os.fdopen(pipe_read, "rb") as reader:
            text = reader.read().decode("utf-8", "replace")
        text = re.sub(r"\b0x[0-9a-f]+|(?<=\b(?:started|stopped|.daemon) )\d+", "…", text)
        done.append((text.replace(str(pid), "PID"), ends.get(timeout=60)[1]))
print(json.dumps([done, plain]))
