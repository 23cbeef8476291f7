"""What a launcher asks and tells the ddpruns of a machine: real ones where it matters."""

import contextlib
import fcntl
import resource
import select
import subprocess
import sys

import pytest
from tests.unit.ddprun import test_nodectl

from ddpwire.run_files import LOCK

run_dir = test_nodectl.run_dir  # the fixture

NODECTL = [sys.executable, "-m", "ddprun.nodectl"]


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


def test_nodectl_needs_little_cpu_time():
    """At most five times the CPU time of importing argparse and json, each the best of three."""
    spent = [(cpu_seconds(*NODECTL, "port"), cpu_seconds(sys.executable, "-c", "import argparse, json"))
             for _ in range(3)]  # fmt: skip
    nodectl_s, imports_s = map(min, zip(*spent, strict=True))
    assert nodectl_s < 5 * imports_s, spent
