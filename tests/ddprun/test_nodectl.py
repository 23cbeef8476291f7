"""What a launcher asks and tells the ddpruns of a machine: real ones where it matters."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

NODECTL = [sys.executable, "-m", "ddprun.nodectl"]


def nodectl(*args, **kw):
    """Exit code, stdout and stderr."""
    done = subprocess.run([*NODECTL, *map(str, args)], capture_output=True, text=True, timeout=30, check=False, **kw)
    return done.returncode, done.stdout, done.stderr


def test_show_and_signal_a_node(runs):
    node = runs.start("act.py", "all=deaf", options=("--nproc-per-node", "2"))
    runs.wait_until_ready(node)
    runs.until(lambda: json.loads((node.folder / "node.json").read_text())["state"] == "training")
    state = json.loads((node.folder / "node.json").read_text())
    code, shown, _ = nodectl("show", node.folder)
    assert (code, json.loads(shown)) == (0, {"dir": str(node.folder), "alive": True, "node": state, "outcome": None})
    assert (state["pid"], state["state"]) == (node.process.pid, "training")
    code, told, _ = nodectl("signal", "--signal", "KILL", "--wait", "5", node.folder)
    assert (code, json.loads(told)) == (0, {"dir": str(node.folder), "signalled": True, "alive": False})
    assert runs.alive() == []
    assert json.loads((node.folder / "outcome.json").read_text()) == {
        "code": 137,
        "cause": "stopped",
        "message": "killed on request, without saving",
        "node": None,
        "rank": None,
        "step": None,
        "retry": True,
        "attempt": 1,
    }
    code, told, _ = nodectl("signal", node.folder)
    assert (code, json.loads(told)) == (0, {"dir": str(node.folder), "signalled": False, "alive": False})


def test_show_what_is_not_there(tmp_path):
    (tmp_path / "node.json").write_text("{torn")
    lines = nodectl("show", tmp_path, tmp_path / "none")[1].splitlines()
    nothing = {"alive": False, "node": None, "outcome": None}
    assert [json.loads(line) for line in lines] == [
        {"dir": str(tmp_path)} | nothing,
        {"dir": str(tmp_path / "none")} | nothing,
    ]


def test_a_free_port_and_a_taken_one():
    code, free, _ = nodectl("port")
    assert code == 0
    assert nodectl("port", "--want", json.loads(free)["port"]) == (0, free, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = " ".join(psutil.Process().cmdline())[:80]
        line = f"port {port} on 127.0.0.1 cannot be had: address already in use by pid {os.getpid()} ({command})\n"
        assert nodectl("port", "--want", port) == (69, "", line)
    assert nodectl("port", "--want", 65536) == (2, "", "port 65536 is out of range: 1 to 65535, or 0 for any\n")
    line = "name.invalid does not resolve: name or service not known\n"
    code, _, said = nodectl("port", "--host", "name.invalid")
    assert (code, said.partition(":")[0]) == (69, line.partition(":")[0])  # the reason depends on the resolver
    line = "203.0.113.7 is no address of this machine, which has to listen there\n"
    assert nodectl("port", "--host", "203.0.113.7") == (69, "", line)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for node, rank in ((0, 0), (1, 3), (10, 20)):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        (folder / "node.log").write_text(f"[node{node}] hello\n[node{node} rank{rank}] a\n[node{node} rank{rank}] b")
        (folder / f"rank-{rank}.log").write_text("a\nb\n")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--node", "1"], "[node1] hello\n[node1 rank3] a\n[node1 rank3] b\n"),
        (["--rank", "3"], "[node1 rank3] a\n[node1 rank3] b\n"),
        (["--rank", "20", "--rank", "0", "--tail", "1"], "[node0 rank0] b\n[node10 rank20] b\n"),
        (["--tail", "1"], "[node0 rank0] b\n[node1 rank3] b\n[node10 rank20] b\n"),
        (["--rank", "0", "-f"], "[node0 rank0] a\n[node0 rank0] b\n"),
    ],
)
def test_logs(run_dir, options, expected):
    assert nodectl("logs", *options, run_dir) == (0, expected, "")


def test_logs_that_are_not_there(run_dir):
    assert nodectl("logs", "--rank", "9", run_dir) == (66, "", "")


def test_following_ends_with_the_run_and_loses_nothing(runs):
    node = runs.start("say.py")
    runs.until((node.folder / "node.json").exists)
    done = subprocess.run(
        [*NODECTL, "logs", "-f", "--rank", "0", str(runs.run_dir)], capture_output=True, timeout=90, check=False
    )
    assert node.end() == 0
    lines = [f"[node0 rank0] {line}" for line in node.log(0).split("\n")]
    assert done.stdout.decode().splitlines() == lines


def test_it_is_quick():
    cpu_s = []
    for _ in range(3):
        before, began = os.times(), time.monotonic()
        nodectl("port")
        after = os.times()
        used_s = after.children_user + after.children_system - before.children_user - before.children_system
        cpu_s.append(min(used_s, time.monotonic() - began))
    assert min(cpu_s) < 0.15
