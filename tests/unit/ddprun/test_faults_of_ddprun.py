"""What ends ddprun itself: values in the store that no ddprun writes, a supervisor that dies, a thread that ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed import DistNetworkError, HashStore, TCPStore

from ddprun import node_config, stores
from ddprun.errors import NodeError, config_error
from ddprun.main import CRASH_LOG, end_on_thread_error
from ddpwire.exits import Exit


@pytest.mark.parametrize("value", [b"garbage", b"[1]", b"{}", b'{"token": ', b"\xff"])
def test_a_value_that_no_ddprun_writes_is_refused(value):
    with pytest.raises(NodeError) as error:
        stores.decode("claim/1", value, lambda claim: str(claim["token"]))
    assert (error.value.code, error.value.outcome.cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "claim/1" in error.value.message
    assert stores.decode("claim/1", b'{"token": "a"}', lambda claim: str(claim["token"])) == "a"


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


def test_a_value_that_no_node_of_the_run_has_signed_is_refused(wording):
    wrapped = HashStore()
    ours = stores.SignedStore(wrapped, SECRET.encode(), "night")
    ours.set("a", "1")
    assert (ours.get("a"), ours.compare_set("b", "", "2"), ours.compare_set("a", "", "3")) == (b"1", b"2", b"1")
    assert wrapped.get("a").startswith(stores.SIGNED)
    forged = {
        "none": "1",
        "wrong": f"{stores.SIGNED.decode()}{64 * '0'} 1",
        "of another key": wrapped.get("b").decode(),
        "of another run": signature_of("1", SECRET, "day"),
        "with another secret": signature_of("1", SECRET[::-1], "night"),
    }
    for value in forged.values():
        wrapped.set("a", value)
        for read in (lambda: ours.get("a"), lambda: ours.compare_set("a", "", "1")):
            with pytest.raises(NodeError) as error:
                read()
            assert (error.value.code, error.value.outcome.cause) == (Exit.UNAVAILABLE, "unavailable")
        wording(error.value.message)
    with pytest.raises(NodeError) as error:
        stores.SignedStore(wrapped, b"", "night").get("b")
    assert error.value.code == Exit.CONFIG


def signature_of(value, secret, run_id):
    store = HashStore()
    stores.SignedStore(store, secret.encode(), run_id).set("a", value)
    return store.get("a").decode()


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
def test_a_node_without_the_secret_of_the_others_is_told(runs, secret, wording, with_secret):
    port = runs.free_port()
    env = {"DDP_SECRET_FILE": str(secret)}
    first, second = (
        runs.start("act.py", node=node, nodes="2", port=port, env=env if node == with_secret else {}) for node in (0, 1)
    )
    code = Exit.UNAVAILABLE if with_secret else Exit.CONFIG
    assert second.end() == code
    wording(second.outcome().message)
    first.process.terminate()
    first.end()
    assert runs.nothing_is_left()


@pytest.mark.parametrize("case", ["missing", "readable", "short", "fifo"])
def test_a_secret_that_cannot_be_one_is_refused(case, secret, wording):
    match case:
        case "missing":
            secret.unlink()
        case "readable":
            secret.chmod(0o644)
        case "short":
            secret.write_text("short\n")
        case "fifo":
            secret.unlink()
            os.mkfifo(secret, 0o600)
    with pytest.raises(NodeError) as error:
        node_config.read_secret({"DDP_SECRET_FILE": str(secret)})
    assert error.value.code == Exit.CONFIG
    wording(error.value.message.replace(str(secret), "FILE"))


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
from ddprun.logs import RankStreams
from ddprun.workers import SupervisorLostError, Workers
read, write = os.pipe()
workers = Workers([], lock_fd=read, fork=False)
workers.on_exit = lambda tag, status: None
(supervisor,) = psutil.Process().children()
workers.clear()  # it has answered: it reads
workers.continue_supervisor = lambda: None
supervisor.suspend()
threading.Timer(0.3, supervisor.kill).start()
try:
    workers.start("1.0", ["true"], {}, RankStreams(read, write, write))
except SupervisorLostError as error:
    print(error)
"""


def test_a_supervisor_that_is_killed_with_a_request_unread_is_lost_at_once(wording):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_SUPERVISOR], capture_output=True, text=True, timeout=50, check=True
    )
    wording(done.stdout.strip())  # not that it did not answer in time, after 60 s
    assert done.stderr == ""


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


def test_sigterm_ends_a_node_whose_supervisor_does_not_answer(runs, stopped_while_starting):
    node, supervisor = stopped_while_starting
    node.process.send_signal(signal.SIGUSR1)  # does not hold up the signals after it
    node.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(psutil.NoSuchProcess):
        while node.process.poll() is None:
            supervisor.suspend()
            time.sleep(0.01)
    assert (node.end(), node.outcome().cause) == (143, "stopped")
    assert runs.nothing_is_left()


def test_a_stopped_supervisor_is_named_and_continued_while_ranks_run(runs, wording):
    node = runs.start("act.py", "0=save")
    runs.wait_until_ready(node)
    supervisor = supervisor_of(node)
    supervisor.suspend()
    said = runs.until(lambda: [line for line in node.said() if "SIGSTOP" in line])
    wording(said[0].replace(str(supervisor.pid), "PID"))
    node.process.terminate()
    assert node.end() == 143
    assert node.log(0).endswith("saved on SIGTERM\n")


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("consensus", ValueError("bad"), Exit.SOFTWARE),
        ("consensus", config_error("bad"), Exit.CONFIG),
        ("history", ValueError("bad"), None),
    ],
    ids=["fault", "refusal", "measuring"],
)
def test_a_thread_that_ends_with_an_exception_ends_the_node_unless_it_only_measures(name, error, code, tmp_path):
    outcomes, lines = [], []

    class End:
        folder = SimpleNamespace(path=tmp_path)
        console = SimpleNamespace(log=lines.append)

        def __call__(self, outcome):
            outcomes.append(outcome)

    args = SimpleNamespace(
        exc_type=type(error), exc_value=error, exc_traceback=None, thread=threading.Thread(name=name)
    )
    end_on_thread_error(args, End())
    assert [outcome.code for outcome in outcomes] == ([code] if code else [])
    assert len(lines) == (code is None)
    assert (tmp_path / CRASH_LOG).exists() == (code == Exit.SOFTWARE)
