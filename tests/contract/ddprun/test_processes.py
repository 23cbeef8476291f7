"""Faults of ddprun's own processes, which may be killed or stopped, and of values in its store that no ddprun wrote."""

import contextlib
import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests import forks

from ddpwire.exits import Exit
from ddpwire.run_files import Outcome


@pytest.mark.parametrize("victim", ["ddprun", "supervisor", "rank"])
def test_whichever_process_is_killed_nothing_is_left(runs, victim):
    runs.executed = victim == "ddprun"
    node = runs.start("act.py", "all=family", options=("--nproc-per-node", "2", "--max-restarts", "0"))
    runs.wait_until_ready(node)
    runs.until(lambda: len(runs.alive()) == 3 + 2 * 4)
    supervisor = supervisor_of(node)
    pids = {"ddprun": node.process.pid, "supervisor": supervisor.pid, "rank": node.rank_pid(0)}
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "ddprun":
        assert runs.remaining() == []
        return
    assert node.end() == 137
    assert runs.remaining() == []
    if victim == "supervisor":  # both ranks fell at once
        assert node.outcome().code == 137
        assert "supervisor" in node.messages()[1]
    else:
        assert node.facts() == Outcome(code=137, cause="killed", message="", node=0, rank=0, retry=True)


def test_a_killed_supervisor_is_replaced_when_there_are_restarts(runs):
    node = runs.start("act.py", "0=family", "again=0", options=("--max-restarts", "1"))
    runs.until(lambda: len(runs.alive()) == 3 + 4)
    supervisor_of(node).kill()
    assert node.end() == 0
    assert node.outcome().attempt == 2
    assert any("exec" in line for line in node.messages()), "nothing is left that has imported torch"


def supervisor_of(node):
    """The fork of a node's ddprun that leads a session of its own, as soon as it is there."""
    ddprun = psutil.Process(node.process.pid)
    for child in ddprun.children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if child.cmdline() == ddprun.cmdline() and os.getsid(child.pid) == child.pid:
                return child
    return None


def test_a_stopped_supervisor_is_named_and_continued_while_ranks_run(runs):
    node = runs.start("act.py", "0=save")
    runs.wait_until_ready(node)
    supervisor = supervisor_of(node)
    supervisor.suspend()
    lines = runs.until(lambda: [line for line in node.messages() if "SIGSTOP" in line])
    assert f"pid {supervisor.pid}" in lines[0]
    node.process.terminate()
    assert node.end() == 143
    assert node.log(0).endswith("saved on SIGTERM\n")


def test_the_kernel_kills_ranks_for_memory_before_their_ddprun(runs):
    node = runs.start("act.py")
    runs.wait_until_ready(node)
    pids = (node.process.pid, node.rank_pid(0))
    own, of_rank = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    node.process.terminate()
    assert (node.end(), of_rank) == (143, min(1000, own + 500))


# Prints the value that node 1 has written last, and writes another one: again, as the node's own heartbeat does.
FORGE = """\
import sys, time
from torch.distributed import DistNetworkError, TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False)
print(store.get("beat/1").decode())
try:
    while True:
        store.set("beat/1", sys.argv[3])
        time.sleep(0.02)
except DistNetworkError:
    pass  # node 0 has ended
"""


def forge(nodes, value):
    """Write a value for the heartbeat of node 1 until node 0 ends. Return the heartbeat that was there before."""
    place = nodes[0].state().master.split(":")
    done = forks.run(["-c", FORGE, *place, value], env=os.environ, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_that_reads_a_value_of_no_ddprun_ends_with_an_outcome(runs):
    nodes = runs.pair("act.py")
    runs.wait_until_ready(*nodes)
    forge(nodes, "not json")
    assert (nodes[0].end(), nodes[0].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "beat/1" in nodes[0].outcome().message
    assert nodes[1].end() == Exit.KILLED
    assert runs.remaining() == []


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
    assert forge(nodes, json.dumps({"at": 1, "attempt": 0, "signs": []})).startswith("hmac-sha256:")
    assert SECRET not in "".join(path.read_text(errors="replace") for path in runs.run_dir.rglob("*") if path.is_file())
    assert (nodes[0].end(), nodes[0].outcome().cause) == (Exit.UNAVAILABLE, "unavailable")
    assert "beat/1" in nodes[0].outcome().message
    assert nodes[1].end() == Exit.KILLED
    assert runs.remaining() == []


def test_a_node_without_the_secret_of_the_others_is_told(runs, secret):
    port = runs.free_port()
    first = runs.start("act.py", nodes="2", port=port, env={"DDP_SECRET_FILE": str(secret)})
    second = runs.start("act.py", node=1, nodes="2", port=port)
    assert second.end() == Exit.CONFIG
    assert "DDP_SECRET_FILE" in second.outcome().message
    first.process.terminate()
    first.end()
    assert runs.remaining() == []
