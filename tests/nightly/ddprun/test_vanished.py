"""A node 0 that falls silent, and closes no connection, before the others train: every call to its store just waits."""

import gc
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from tests.fixtures.nodes import until

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


def test_a_store_client_that_is_no_longer_used_leaves_no_thread_and_no_socket() -> None:
    torch = pytest.importorskip("torch.distributed")
    from ddprun.system import stores

    server = torch.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    client = stores.connect("127.0.0.1", server.port)
    client.set("a", "b")
    del client
    gc.collect()
    threads, descriptors = threading.active_count(), num_descriptors()
    for _ in range(5):
        client = stores.connect("127.0.0.1", server.port)
        client.set("a", "b")
        del client
        gc.collect()
    until(lambda: threading.active_count() <= threads and num_descriptors() <= descriptors)


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
