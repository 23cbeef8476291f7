"""What a launcher asks and tells the ddpruns of a machine, and whether a node is healthy, by real ones where needed."""

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from ddprun import healthcheck
from ddpwire import merged_output
from ddpwire.merged_output import MergedOutput
from ddpwire.run_files import NodeState, append_bounded

NODECTL = [sys.executable, "-m", "ddprun.nodectl"]


def nodectl(*args, **kw):
    """Exit code, stdout and stderr."""
    done = subprocess.run([*NODECTL, *map(str, args)], capture_output=True, text=True, timeout=240, check=False, **kw)
    return done.returncode, done.stdout, done.stderr


def test_a_missing_or_torn_record_is_shown_as_a_node_that_is_not_alive(tmp_path):
    (tmp_path / "node.json").write_text("{torn")
    lines = nodectl("show", tmp_path, tmp_path / "none")[1].splitlines()
    nothing = {"alive": False, "node": None, "outcome": None, "remains": False, "history": ""}
    assert [json.loads(line) for line in lines] == [
        {"dir": str(tmp_path), "gone": False} | nothing,
        {"dir": str(tmp_path / "none"), "gone": True} | nothing,
    ]


def test_a_free_port_is_printed_and_a_taken_one_names_its_holder():
    code, free, _ = nodectl("port")
    assert code == 0
    assert nodectl("port", "--want", json.loads(free)["port"]) == (0, free, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = f"pid {os.getpid()} ({' '.join(psutil.Process().cmdline())[:80]})"
        code, out, err = nodectl("port", "--want", port)
    assert (code, out, holder in err) == (69, "", True)
    assert f"port {port} on 127.0.0.1" in err
    code, out, err = nodectl("port", "--want", 65536)
    assert (code, out, "65536" in err) == (2, "", True)
    code, _, err = nodectl("port", "--host", "name.invalid")
    assert (code, "name.invalid" in err) == (69, True)
    code, out, err = nodectl("port", "--host", "203.0.113.7")
    assert (code, out, "203.0.113.7" in err) == (69, "", True)


@pytest.mark.parametrize(
    ("answer", "code", "gpus", "reason"),
    [
        ("echo GPU-a; echo WARNING: infoROM is corrupted; echo MIG-b; echo warning >&2", 0, "GPU-a\nMIG-b\n", ""),
        ("echo No devices were found; exit 6", 0, "", ""),
        ("echo GPU-a; echo Unknown Error; exit 15", 69, "", "nvidia-smi failed (Unknown Error)\n"),
        (None, 0, "", ""),
    ],
    ids=["two", "none", "failed", "no nvidia-smi"],
)
def test_the_gpus_are_those_that_nvidia_smi_lists(tmp_path, answer, code, gpus, reason):
    if answer:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert nodectl("gpus", env={"PATH": f"{tmp_path}"}) == (code, gpus, reason)
    assert nodectl("gpus", env={"PATH": f"{tmp_path}", "CUDA_VISIBLE_DEVICES": "3, 05"}) == (0, "3\n5\n", "")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for node, rank in ((0, 0), (1, 3), (10, 20)):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        (folder / "node.log").write_text(f"[node{node}] hello\n[node{node} rank{rank}] a\n[node{node} rank{rank}] b")
        (folder / f"rank-{rank}.log").write_text("a\nb\n")
    return tmp_path


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (["--node", "1"], 0, "[node1] hello\n[node1 rank3] a\n[node1 rank3] b\n"),
        (["--rank", "3"], 0, "[node1 rank3] a\n[node1 rank3] b\n"),
        (["--rank", "20", "--rank", "0", "--tail", "1"], 0, "[node0 rank0] b\n[node10 rank20] b\n"),
        (["--tail", "1"], 0, "[node0 rank0] b\n[node1 rank3] b\n[node10 rank20] b\n"),
        (["--rank", "0", "-f"], 0, "[node0 rank0] a\n[node0 rank0] b\n"),
        (["--file", "rank-3.log", "--file", "rank-9.log", "--tail", "1"], 0, "b\n"),
        (["--rank", "9"], 66, ""),
    ],
)
def test_logs_are_selected_by_node_rank_and_tail(run_dir, options, code, expected):
    assert nodectl("logs", *options, run_dir) == (code, expected, "")


@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\nbb\n\nccc", b"a\nbb\n\nccc\n", b"\n\n\n", b"x" * 20])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_the_last_lines_of_a_file(text, block, monkeypatch, tmp_path):
    monkeypatch.setattr(merged_output, "BLOCK_BYTES", block)
    (tmp_path / "log").write_bytes(text)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for count in range(6):
        written = []
        tail = merged_output.LogTail(tmp_path / "log", MergedOutput(written.append).add_source(), count)
        tail.pass_on()
        tail.close()
        assert b"".join(written).split(b"\n")[:-1] == lines[max(0, len(lines) - count) :]


def test_a_log_that_is_followed_goes_on_in_a_new_file(tmp_path):
    written, path = [], tmp_path / "a.log"
    path.write_bytes(b"a\n")
    tail = merged_output.LogTail(path, MergedOutput(written.append).add_source(), None)
    tail.pass_on()
    append_bounded(path, b"b\n", 3)
    tail.pass_on()
    append_bounded(path, b"c\n", 3)
    tail.pass_on()
    tail.close()
    assert b"".join(written) == b"a\nb\nc\n"
    assert ((tmp_path / "a.1.log").read_bytes(), path.read_bytes()) == (b"a\nb\n", b"c\n")


def node(folder: Path, metrics: str | None) -> Path:
    folder.mkdir(parents=True)
    NodeState(run="x", node=0, pid=1, state="training", started=0.0, metrics=metrics).write(folder)
    return folder


def test_a_node_is_found_by_who_holds_its_lock(tmp_path: Path) -> None:
    for pid, target in (("7", "/runs/x/node-1/ddprun.lock"), ("8", "/runs/x/node-1/ddprun.lock"), ("9", "/dev/null")):
        descriptors = tmp_path / "proc" / pid / "fd"
        descriptors.mkdir(parents=True)
        (descriptors / "5").symlink_to(target)
    (tmp_path / "proc" / "self").symlink_to("7")
    assert healthcheck.locked_nodes(tmp_path / "proc") == {Path("/runs/x/node-1")}
    (tmp_path / "node-0").mkdir()
    with (tmp_path / "node-0" / "ddprun.lock").open("w"):
        assert tmp_path / "node-0" in healthcheck.locked_nodes(Path("/proc"))
    assert tmp_path / "node-0" not in healthcheck.locked_nodes(Path("/proc"))


def test_a_node_that_starts_and_one_that_answers_are_healthy_and_one_whose_record_is_torn_is_not(
    tmp_path: Path,
) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    starting = node(tmp_path / "node-0", None)
    assert healthcheck.find_problem(starting) == ""
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answering = node(tmp_path / "node-1", f"http://127.0.0.1:{server.server_port}/metrics")
    try:
        assert healthcheck.find_problem(answering) == ""
    finally:
        server.shutdown()
        server.server_close()
    assert healthcheck.find_problem(answering) == "node-1: <urlopen error [Errno 111] Connection refused>"
    (starting / "node.json").write_text("{")
    assert healthcheck.find_problem(starting).startswith("node-0: ")
