"""A node 0 that falls silent, and closes no connection, before the others train: every call to its store just waits."""

import signal
import subprocess
import sys
import time

import pytest

from ddpwire.run_files import Outcome

CLOSE = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
from ddprun.system.processes import close_descriptors
kept, other = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
close_descriptors(kept)
os.fstat(kept)
try:
    os.fstat(other)
except OSError:
    print("closed")
"""


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_while_a_third_node_is_waited_for(runs, wait_s):
    port, options = runs.free_port(), ("--join-timeout", "120")
    first = runs.start("act.py", nodes="3", port=port, options=options)
    second = runs.start("act.py", node=1, nodes="3", port=port, options=options)
    runs.until(lambda: (second.folder / "node.json").exists() and second.state().master)
    time.sleep(wait_s)
    first.process.send_signal(signal.SIGSTOP)
    assert second.end() == 137
    assert second.facts() == Outcome(code=137, cause="node_lost", message="", node=0, retry=True)
    first.process.kill()


def test_closing_descriptors_does_not_count_to_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", CLOSE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "closed\n", done.stderr
