"""What a launcher asks and tells the ddpruns of a machine: real ones where it matters."""

import contextlib
import fcntl
import json
import os
import resource
import select
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddprun import nodectl as nodectl_module
from ddpwire.merged_output import MergedOutput
from ddpwire.run_files import LOCK, append_bounded

NODECTL = [sys.executable, "-m", "ddprun.nodectl"]


def nodectl(*args, **kw):
    """Exit code, stdout and stderr."""
    done = subprocess.run([*NODECTL, *map(str, args)], capture_output=True, text=True, timeout=240, check=False, **kw)
    return done.returncode, done.stdout, done.stderr


def test_show_and_signal_a_node(runs, wording):
    node = runs.start("act.py", "all=deaf", options=("--nproc-per-node", "2"))
    runs.wait_until_ready(node)

    def read_state():
        return json.loads((node.folder / "node.json").read_text())

    def look():
        """A state, and what is shown of it, if it did not change meanwhile."""
        state, (code, shown, _) = read_state(), nodectl("show", node.folder)
        found = json.loads(shown)
        return state == read_state() and found["history"].count("\n") > 1 and (state, code, found)

    runs.until(lambda: read_state()["state"] == "training")
    state, code, found = runs.until(look)
    head, *rows = found.pop("history").splitlines()
    known = (node.folder / "history.csv").read_text().splitlines()
    assert head == known[0]
    assert rows
    assert {*rows} <= {*known}
    assert (code, found) == (
        0,
        {"dir": str(node.folder), "gone": False, "alive": True, "node": state, "outcome": None, "remains": False},
    )
    assert (state["pid"], state["state"]) == (node.process.pid, "training")
    code, told, _ = nodectl("signal", "--signal", "KILL", "--wait", "60", node.folder)
    assert (code, json.loads(told)) == (0, {"dir": str(node.folder), "signalled": True, "alive": False})
    assert runs.alive() == []
    outcome = json.loads((node.folder / "outcome.json").read_text())
    wording(outcome.pop("message"))
    assert outcome == {
        "code": 137,
        "cause": "stopped",
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
    nothing = {"alive": False, "node": None, "outcome": None, "remains": False, "history": ""}
    assert [json.loads(line) for line in lines] == [
        {"dir": str(tmp_path), "gone": False} | nothing,
        {"dir": str(tmp_path / "none"), "gone": True} | nothing,
    ]


def test_a_free_port_and_a_taken_one(wording):
    code, free, _ = nodectl("port")
    assert code == 0
    assert nodectl("port", "--want", json.loads(free)["port"]) == (0, free, "")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        holder = f"pid {os.getpid()} ({' '.join(psutil.Process().cmdline())[:80]})"
        code, out, err = nodectl("port", "--want", port)
    assert (code, out, holder in err) == (69, "", True)
    wording(err.replace(holder, "pid PID (COMMAND)"), port=port)
    code, out, err = nodectl("port", "--want", 65536)
    assert (code, out) == (2, "")
    wording(err)
    code, _, err = nodectl("port", "--host", "name.invalid")
    assert code == 69
    wording(err.partition(":")[0])  # the reason depends on the resolver
    code, out, err = nodectl("port", "--host", "203.0.113.7")
    assert (code, out) == (69, "")
    wording(err)


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
        (["--file", "rank-3.log", "--file", "rank-9.log", "--tail", "1"], "b\n"),
    ],
)
def test_logs(run_dir, options, expected):
    assert nodectl("logs", *options, run_dir) == (0, expected, "")


@pytest.mark.parametrize("text", [b"", b"\n", b"a", b"a\n", b"a\nbb\n\nccc", b"a\nbb\n\nccc\n", b"\n\n\n", b"x" * 20])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_the_last_lines_of_a_file(text, block, monkeypatch, tmp_path):
    monkeypatch.setattr(nodectl_module, "BLOCK_BYTES", block)
    (tmp_path / "log").write_bytes(text)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for count in range(6):
        written = []
        tail = nodectl_module.LogTail(tmp_path / "log", MergedOutput(written.append).add_source(), count)
        tail.pass_on()
        tail.close()
        assert b"".join(written).split(b"\n")[:-1] == lines[max(0, len(lines) - count) :]


def test_a_log_that_is_followed_goes_on_in_a_new_file(tmp_path):
    written, path = [], tmp_path / "a.log"
    path.write_bytes(b"a\n")
    tail = nodectl_module.LogTail(path, MergedOutput(written.append).add_source(), None)
    tail.pass_on()
    append_bounded(path, b"b\n", 3)
    tail.pass_on()
    append_bounded(path, b"c\n", 3)
    tail.pass_on()
    tail.close()
    assert b"".join(written) == b"a\nb\nc\n"
    assert ((tmp_path / "a.1.log").read_bytes(), path.read_bytes()) == (b"a\nb\n", b"c\n")


@pytest.mark.parametrize("options", [["--tail", "5"], []], ids=["tail", "all"])
def test_a_large_log_needs_little_memory(options, tmp_path):
    (tmp_path / "node-0").mkdir()
    with (tmp_path / "node-0" / "node.log").open("wb") as log:
        for start in range(0, 1_000_000, 100_000):
            log.writelines(b"%063d\n" % number for number in range(start, start + 100_000))
    limit = 50 << 20  # bytes; the log has 64 million
    done = subprocess.Popen(
        [*NODECTL, "logs", *options, str(tmp_path)],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit)),
    )
    assert done.stdout is not None
    with done.stdout as lines:
        numbers = [int(line) for line in lines]
    assert done.wait(240) == 0
    assert numbers == list(range(999_995 if options else 0, 1_000_000))


def test_logs_that_are_not_there(run_dir):
    assert nodectl("logs", "--rank", "9", run_dir) == (66, "", "")


def test_following_ends_with_the_run_and_loses_nothing(runs):
    node = runs.start("say.py")
    runs.until((node.folder / "rank-0.log").exists)  # nodectl waits 10 s for it
    done = subprocess.run(
        [*NODECTL, "logs", "-f", "--rank", "0", str(runs.run_dir)], capture_output=True, timeout=240, check=False
    )
    assert node.end() == 0
    lines = [f"[node0 rank0] {line}" for line in node.log(0).splitlines()]
    assert done.stdout.decode().splitlines() == lines


def grow(path, text):
    with path.open("ab") as file:
        file.write(text)


@contextlib.contextmanager
def followed(run_dir, nodes, *options):
    """The logs of nodes that are alive, and what ``nodectl logs --follow`` prints of them as they grow."""
    paths = [run_dir / f"node-{node}" / "node.log" for node in range(nodes)]
    with contextlib.ExitStack() as stack:
        for path in paths:
            path.parent.mkdir(parents=True)
            path.touch()
            lock = stack.enter_context((path.parent / LOCK).open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        process = stack.enter_context(
            subprocess.Popen([*NODECTL, "logs", "-f", *options, str(run_dir)], stdout=subprocess.PIPE, bufsize=0)
        )
        stack.callback(process.kill)

        def read(text):
            """Read until ``text`` comes, and see that nothing else does."""
            shown = b""
            while len(shown) < len(text):
                assert select.select([process.stdout], [], [], 240)[0], shown
                shown += process.stdout.read(len(text) - len(shown))
            assert shown == text

        yield paths, read


def test_a_bar_and_a_prompt_of_a_lone_node_are_passed_on_as_they_come(tmp_path):
    with followed(tmp_path, 1) as ((log,), read):
        grow(log, b"a line\n")
        read(b"a line\n")
        for text in (b"\r[node0 rank0]  45%|##", b"\r[node0 rank0]  46%|##", b"\n", b"(Pdb) ", b"x\n"):
            grow(log, text)
            read(text)


def test_bars_of_two_nodes_share_no_line(tmp_path):
    with followed(tmp_path, 2) as ((first, second), read):
        grow(first, b"a line\n")
        read(b"a line\n")
        grow(first, b"\r[node0 rank0]  1%|\r[node0 rank0]  2%|")
        read(b"[node0 rank0]  2%|")
        grow(second, b"\r[node1 rank2]  1%|")
        read(b"\n[node1 rank2]  1%|")
        grow(second, b"\r[node1 rank2]  2%|")
        read(b"\r[node1 rank2]  2%|")
        grow(first, b"\r[node0 rank0]  3%|\n(Pdb) ")
        read(b"\n[node0 rank0]  3%|\n")
        grow(second, b"\r[node1 rank2]  4%|\nend\n")  # the prompt before it is not whole
        read(b"[node1 rank2]  4%|\nend\n")
        grow(first, b"x\n")
        read(b"(Pdb) x\n")


def cpu_seconds(*argv):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, capture_output=True, timeout=60, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_it_is_quick():
    """At most five times the CPU time of importing argparse and json, each the best of three."""
    spent = [(cpu_seconds(*NODECTL, "port"), cpu_seconds(sys.executable, "-c", "import argparse, json"))
             for _ in range(3)]  # fmt: skip
    nodectl_s, imports_s = map(min, zip(*spent, strict=True))
    assert nodectl_s < 5 * imports_s, spent
