"""Descriptors, threads and sockets that ddprun no longer needs."""

import gc
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

CLOSE = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
from ddprun.processes import close_descriptors
kept, other = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
close_descriptors(kept)
os.fstat(kept)
try:
    os.fstat(other)
except OSError:
    print("closed")
"""


def test_closing_descriptors_does_not_count_to_the_limit():
    done = subprocess.run([sys.executable, "-c", CLOSE], capture_output=True, text=True, timeout=60)
    assert done.stdout == "closed\n", done.stderr


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_store_client_that_is_no_longer_used_leaves_no_thread_and_no_socket():
    torch = pytest.importorskip("torch.distributed")
    from ddprun import stores

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
    settled = threading.Event()
    for _ in range(600):
        if threading.active_count() <= threads and num_descriptors() <= descriptors:
            break
        settled.wait(0.1)
    assert threading.active_count() <= threads
    assert num_descriptors() <= descriptors
