"""What is shown of the ranks' output, and what is kept of it."""

import os
import subprocess
import sys

from tests import forks
from tests.fixtures.nodes import RANKS

from ddpwire.run_files import timed_log


def test_the_last_lines_of_the_rank_that_failed_are_not_shown_twice(runs):
    node = runs.start("act.py", "1=3", options=("--nproc-per-node", "2"))
    assert node.end() == 3
    assert "[node0 rank1] ready" in node.stdout.read_text().splitlines()
    assert (node.outcome().cause, node.outcome().node, node.outcome().rank) == ("error", 0, 1)
    assert len(node.messages()) == 2
    assert "RUN/node-0/rank-1.log" in node.messages()[-1]


def test_the_console_shows_the_rank_that_failed_first(runs) -> None:
    node = runs.start("cry.py", "1", options=("--nproc-per-node", "3"))
    assert node.end() == 1
    lines = [line for line in node.rank_lines() if "ready" not in line]
    assert [line[: len("[node0 rank1]")] for line in lines] == ["[node0 rank1]"] * len(lines)
    assert lines[-1].endswith("ValueError: bad label 17")
    assert all("RuntimeError: gloo/pair.cc: the connection is closed" in node.log(rank) for rank in (0, 2))
    assert (node.outcome().cause, node.outcome().node, node.outcome().rank) == ("error", 0, 1)
    assert "ValueError: bad label 17" in node.outcome().message
    suppressed, failure = node.messages()[1:]
    assert "rank-0.log, rank-2.log" in suppressed
    assert "rank-1.log" in failure


def test_the_logs_beside_each_other_have_each_line_once(runs) -> None:
    node = runs.start("act.py", "all=0", options=("--nproc-per-node", "2"))
    assert node.end() == 0
    assert sorted(path.name for path in node.folder.glob("rank-*.log")) == ["rank-0.log", "rank-1.log"]
    assert "".join(path.read_text() for path in node.folder.glob("*.log")).count("ready\n") == 2
    assert "ready\n" in (node.folder / timed_log(1)).read_text()


def test_one_rank_writes_the_bytes_that_python_writes(tmp_path) -> None:
    check_bytes_of_one_rank(tmp_path)


def check_bytes_of_one_rank(folder, *options) -> None:
    """And ddprun's own lines apart. Unbuffered, as ddprun sets it: else text that Python buffers would come later."""
    script = str(RANKS / "bytes.py")
    plain = subprocess.run([sys.executable, "-u", script], input=b"typed\n", capture_output=True, check=True)
    command = ["-m", "ddprun", "--run-dir", str(folder / "run"), *options, script]
    ranked = forks.run(command, env=os.environ, given=b"typed\n")
    assert ranked.returncode == 0
    assert ranked.stdout == plain.stdout
    own = [line for line in ranked.stderr.splitlines(keepends=True) if line.startswith(b"[node0] ")]
    assert b"".join(line for line in ranked.stderr.splitlines(keepends=True) if line not in own) == plain.stderr
    assert own
    log = (folder / "run/node-0/rank-0.log").read_bytes()
    both = plain.stdout + plain.stderr
    assert sorted(log.replace(b"\n", b"")) == sorted(both.replace(b"\n", b"")), "only a torn line is ended"


def test_the_order_of_both_streams_is_kept_where_they_lead_to_one_place(tmp_path) -> None:
    script = tmp_path / "both.py"
    script.write_text("import os\nfor number in range(500):\n    os.write(1 + number % 2, b'%d\\n' % number)\n")
    for options in ((), ("--nproc-per-node", "2", "--local-ranks-filter", "0")):
        command = ["-m", "ddprun", "--run-dir", str(tmp_path / "run"), *options, str(script)]
        done = forks.run(command, env=os.environ, stderr=subprocess.STDOUT)
        assert done.returncode == 0
        numbers = [line for line in done.stdout.splitlines() if line.isdigit()]
        assert numbers == [b"%d" % number for number in range(500)]
    assert (tmp_path / "run/node-0/rank-1.log").read_bytes().splitlines() == numbers


def test_without_a_folder_a_success_leaves_none(tmp_path):
    command = ["-m", "ddprun", "--no-python", "/bin/sh", "-c", "echo hello from $RANK"]
    done = forks.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, text=True)
    assert (done.returncode, done.stdout) == (0, "hello from 0\n")
    assert list(tmp_path.iterdir()) == []
