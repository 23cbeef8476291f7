"""What ends ddprun itself: values in the store that no ddprun writes, a supervisor that dies, a thread that ends."""

import contextlib
import json
import os
import time

import psutil
import pytest
from torch.distributed import DistNetworkError, TCPStore

from ddprun import stores
from ddpwire.exits import Exit


@pytest.mark.parametrize(
    ("node", "key", "value"),
    [
        (0, "1/news/1", "garbage"),
        (0, "beat/1", "not json"),
        (1, "1/verdict", "garbage"),
        (1, "1/verdict", '{"restart": 1}'),
    ],
    ids=["post", "heartbeat", "decision", "decision-without-outcome"],
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
    assert runs.nothing_is_left()


SECRET = "0123456789abcdef"  # noqa: S105


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_a_run_with_a_secret_signs_and_ends_at_a_forged_value(runs, secret, monkeypatch):
    monkeypatch.setenv("DDP_SECRET_FILE", str(secret))
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    host, port = nodes[0].state().master.split(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    assert store.get("beat/1").startswith(stores.SIGNED)
    assert SECRET not in "".join(path.read_text(errors="replace") for path in runs.run_dir.rglob("*") if path.is_file())
    with contextlib.suppress(DistNetworkError):
        while nodes[0].process.poll() is None:
            store.set("beat/1", json.dumps({"at": 1, "attempt": 0, "signs": []}))
            time.sleep(0.02)
    assert (nodes[0].end(), nodes[0].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "beat/1" in nodes[0].outcome().message
    assert nodes[1].end() == Exit.KILLED
    assert runs.nothing_is_left()


@pytest.mark.parametrize("with_secret", [0, 1])
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
    assert runs.nothing_is_left()


@pytest.fixture
def stopped_while_starting(runs):
    """A node that has asked its supervisor for a rank, and the supervisor, which is stopped again and again."""
    node = runs.start("act.py", "again=0", options=("--max-restarts", "1"))
    supervisor = runs.until(lambda: supervisor_of(node))

    def stop():
        supervisor.suspend()
        return "was stopped by SIGSTOP" in node.stderr.read_text()

    runs.until(stop)
    return node, supervisor


def supervisor_of(node):
    """The fork of a node's ddprun that leads a session of its own, as soon as it is there."""
    ddprun = psutil.Process(node.process.pid)
    for child in ddprun.children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if child.cmdline() == ddprun.cmdline() and os.getsid(child.pid) == child.pid:
                return child
    return None


def test_a_supervisor_that_is_killed_between_a_request_and_its_answer_costs_a_restart(runs, stopped_while_starting):
    node, supervisor = stopped_while_starting
    supervisor.kill()
    assert node.end() == 0
    assert [event.facts["reason"] for event in node.events() if event.event == "restart"] == ["killed"]
    assert runs.nothing_is_left()


def test_a_stopped_supervisor_is_named_and_continued_while_ranks_run(runs):
    node = runs.start("act.py", "0=save")
    runs.wait_until_ready(node)
    supervisor = supervisor_of(node)
    supervisor.suspend()
    said = runs.until(lambda: [line for line in node.messages() if "SIGSTOP" in line])
    assert f"pid {supervisor.pid}" in said[0]
    node.process.terminate()
    assert node.end() == 143
    assert node.log(0).endswith("saved on SIGTERM\n")
