"""What ends ddprun itself: values in the store that no ddprun writes, a supervisor that dies, a thread that ends."""

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tests.contract.ddprun import test_processes
from tests.unit.ddprun import test_faults_of_ddprun
from torch.distributed import DistNetworkError, TCPStore

from ddprun.settings import node_config
from ddprun.system.errors import NodeError
from ddpwire.exits import Exit

secret = test_faults_of_ddprun.secret  # the fixture


@pytest.fixture
def stopped_while_starting(runs):
    """A node that has asked its supervisor for a rank, and the supervisor, which is stopped again and again."""
    node = runs.start("act.py", "again=0", options=("--max-restarts", "1"))
    supervisor = runs.until(lambda: test_processes.supervisor_of(node))

    def stop():
        supervisor.suspend()
        return "SIGSTOP" in node.stderr.read_text()

    runs.until(stop)
    return node, supervisor


def test_a_supervisor_that_is_killed_between_a_request_and_its_answer_costs_a_restart(runs, stopped_while_starting):
    node, supervisor = stopped_while_starting
    supervisor.kill()
    assert node.end() == 0
    assert [event.facts["reason"] for event in node.events() if event.event == "restart"] == ["killed"]
    assert runs.remaining() == []


def test_sigterm_ends_a_node_whose_supervisor_does_not_answer(runs, stopped_while_starting):
    node, supervisor = stopped_while_starting
    node.process.send_signal(signal.SIGUSR1)  # does not hold up the signals after it
    node.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(psutil.NoSuchProcess):
        while node.process.poll() is None:
            supervisor.suspend()
            time.sleep(0.01)
    assert (node.end(), node.outcome().cause) == (143, "stopped")
    assert runs.remaining() == []


SECRET = "0123456789abcdef"  # noqa: S105


def test_on_kubernetes_an_optional_secret_that_does_not_exist_is_none(tmp_path):
    folder = tmp_path / "ddpctl"
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "DDP_SECRET_FILE": str(folder / "store.secret")}
    with pytest.raises(NodeError):  # nothing is mounted
        node_config.read_secret(pod)
    (folder / "..2026_11_24").mkdir(parents=True)
    (folder / "..data").symlink_to("..2026_11_24")
    assert node_config.read_secret(pod) == b""
    with pytest.raises(NodeError):
        node_config.read_secret({"DDP_SECRET_FILE": pod["DDP_SECRET_FILE"]})
    (folder / "another.secret").write_text(SECRET)
    with pytest.raises(NodeError):  # a Secret without this key
        node_config.read_secret(pod)
    (folder / "store.secret").write_text(SECRET)
    (folder / "store.secret").chmod(0o400)
    assert node_config.read_secret(pod) == SECRET.encode()


KILLED_SUPERVISOR = """
import os, threading, psutil
from ddprun.ranks.workers import SupervisorLostError, Workers
read, write = os.pipe()
workers = Workers([], lock_fd=read, fork=False, log=print)
workers.on_exit = lambda tag, status: None
(supervisor,) = psutil.Process().children()
workers.clear()  # it has answered: it reads
workers.continue_supervisor = lambda: None
supervisor.suspend()
threading.Timer(0.3, supervisor.kill).start()
try:
    workers.start("1.0", ["true"], {}, (read, write, write))
except SupervisorLostError:
    print("lost")
"""


def test_a_supervisor_that_is_killed_with_a_request_unread_is_lost_at_once():
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SUPERVISOR], capture_output=True, text=True, timeout=50, check=True
    )
    assert (done.stdout, done.stderr) == ("lost\n", "")  # before the 60 s in which it may answer


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [(0, "1/news/1", "garbage"), (1, "1/verdict", "garbage"), (1, "1/verdict", '{"restart": 1}')],
)
def test_a_node_that_reads_such_a_value_ends_with_an_outcome(runs, node, key, value):
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    host, port = nodes[0].state().master.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    with contextlib.suppress(DistNetworkError):  # node 0 has ended
        while nodes[node].process.poll() is None:
            store.set(key, value)  # again: the node's own heartbeat writes over it
            time.sleep(0.02)
    assert (nodes[node].end(), nodes[node].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert key in nodes[node].outcome().message
    assert nodes[1 - node].end() == Exit.KILLED
    assert runs.remaining() == []


@pytest.mark.parametrize("with_secret", [1])
def test_a_node_without_the_secret_of_the_others_is_told(runs, secret, with_secret):
    port = runs.free_port()
    env = {"DDP_SECRET_FILE": str(secret)}
    first, second = (
        runs.start("act.py", node=node, nodes="2", port=port, env=env if node == with_secret else {}) for node in (0, 1)
    )
    code = Exit.UNAVAILABLE if with_secret else Exit.CONFIG
    assert second.end() == code
    assert "DDP_SECRET_FILE" in second.outcome().message
    first.process.terminate()
    first.end()
    assert runs.remaining() == []
