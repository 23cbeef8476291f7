"""A rank's stdin, stdout and stderr: apart, as they come where one rank is shown, and a terminal where there is one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forks
from tests.terminal import Session

from ddprun.console import Console
from ddprun.log_view import PROGRESS_S, LineView
from ddprun.logs import RankFile, Stream
from ddprun.termination import SAME_REQUEST_S
from ddprun.timed_log import TimedLog

SCRIPTS = Path(__file__).parent / "scripts"
STARTS = pytest.mark.parametrize("options", [(), ("--exec",)], ids=["fork", "exec"])


class Shown(Console):
    """Keeps what is put on the console."""

    def __init__(self) -> None:
        super().__init__("node0")
        self.texts: list[bytes] = []

    def put(self, _descriptor: int, text: bytes, _source: object = None) -> None:  # type: ignore[override]
        self.texts.append(text)


def test_a_progress_bar_of_several_ranks_is_shown_once_a_second_and_its_last_state_always() -> None:
    console = Shown()
    view = LineView(console, 2, b"[r1] ", 1)
    view.accept(b"\r 10%", 10.0)
    assert console.texts == [b"\r[r1]  10%"]
    view.accept(b"\r 20%", 10.1)
    view.accept(b"\r 3", 10.2)
    assert len(console.texts) == 1
    assert view.due(10.2) == pytest.approx(PROGRESS_S - 0.2)
    view.tick(11.0)
    assert console.texts[1:] == [b"\r[r1]  3  "], "it covers the longer state before"
    assert view.due(11.0) is None
    view.accept(b"\r100%\n", 11.1)
    assert console.texts[2:] == [b"\r[r1] 100%\n"]
    view.accept(b"next\r\nlast\r\r", 11.2)
    view.accept(b"", 11.3)
    assert console.texts[3:] == [b"[r1] next\n", b"[r1] last\n"]


def test_a_traceback_after_an_unfinished_bar_is_held_like_any_other() -> None:
    console = Shown()
    view = LineView(console, 2, b"[r1] ", 1)
    view.accept(b"\r 10%", 10.0)
    view.accept(b"Traceback (most recent call last):\n  File x\nValueError: a\n", 10.1)
    assert console.texts == [b"\r[r1]  10%", b"\r[r1]  10%\n"]
    view.release()
    assert (
        b"".join(console.texts[2:]) == b"[r1] Traceback (most recent call last):\n[r1]   File x\n[r1] ValueError: a\n"
    )


WRITES = """
import sys
from ddprun.console import Console
console = Console("node0")
console.start()
for number in range(int(sys.argv[1])):
    console.put(1, b"%0999d\\n" % number, console)
console.drain(float(sys.argv[2]))
"""


def test_a_slow_reader_of_a_pipe_that_is_not_blocking_gets_every_byte() -> None:
    """It takes longer than the console waits for a reader that takes nothing."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([sys.executable, "-c", WRITES, "3000", "1.0"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    with os.fdopen(read, "rb", buffering=0) as file:
        shown = b""
        while data := file.read(1 << 14):
            shown += data
            time.sleep(0.01)
    assert shown == b"".join(b"%0999d\n" % number for number in range(3000))
    assert (process.communicate()[1], process.returncode) == (b"", 0)


def test_what_nobody_reads_is_counted() -> None:
    read, write = os.pipe()
    done = subprocess.run(
        [sys.executable, "-c", WRITES, "1000", "0.3"], stdout=write, stderr=subprocess.PIPE, text=True, check=True
    )
    os.close(read)
    os.close(write)
    (line,) = done.stderr.splitlines()
    number, text = re.fullmatch(r"\[node0\] (\d+) (pieces of output were dropped .*)", line).groups()
    assert 900 < int(number) < 1000
    assert text == "pieces of output were dropped because nothing read them, but they are in the ranks' logs"


def test_the_file_of_a_rank_has_whole_lines_of_both_streams(tmp_path) -> None:
    file = RankFile(tmp_path / "rank-0.log", num_streams=2)
    pipes = [os.pipe(), os.pipe()]
    out, err = (
        Stream(read, number, 0, file, LineView(Shown(), number, b"", 0), TimedLog(tmp_path / "rank-0.timed.log", 0, 0))
        for number, (read, _) in enumerate(pipes, 1)
    )

    def write(stream: int, text: bytes, now: float) -> None:
        os.write(pipes[stream - 1][1], text)
        (out if stream == 1 else err).read(now)

    write(1, b"half a ", 1.0)
    write(2, b"warning\n", 1.01)
    write(1, b"line\n", 1.02)
    write(2, b"\r 10%", 2.0)
    err.tick(3.1)
    write(1, b"step 1\n", 3.2)
    write(2, b"\r 20%\n", 3.3)
    assert (tmp_path / "rank-0.log").read_bytes() == b"warning\nhalf a line\n\r 10%\nstep 1\n\r 20%\n"
    write(1, b"cut", 4.0)
    for stream, (_, end) in zip((out, err), pipes, strict=True):
        os.close(end)
        assert stream.read(4.1) is False
        stream.close()
    assert (tmp_path / "rank-0.log").read_bytes().endswith(b"\ncut")
    again = RankFile(tmp_path / "rank-0.log", num_streams=1)
    again.write(out, b"next attempt\n")
    again.close()
    assert (tmp_path / "rank-0.log").read_bytes().endswith(b"\ncut\nnext attempt\n")


@STARTS
@pytest.mark.e2e
def test_one_rank_writes_the_bytes_that_python_writes(tmp_path, options) -> None:
    """And ddprun's own lines apart. Unbuffered, as ddprun sets it: else text that Python buffers would come later."""
    script = str(SCRIPTS / "bytes.py")
    plain = subprocess.run([sys.executable, "-u", script], input=b"typed\n", capture_output=True, check=True)
    command = ["-m", "ddprun", "--run-dir", str(tmp_path / "run"), *options, script]
    ranked = forks.run(command, env=os.environ, given=b"typed\n")
    assert ranked.returncode == 0
    assert ranked.stdout == plain.stdout
    own = [line for line in ranked.stderr.splitlines(keepends=True) if line.startswith(b"[node0] ")]
    assert b"".join(line for line in ranked.stderr.splitlines(keepends=True) if line not in own) == plain.stderr
    assert own
    log = (tmp_path / "run/node-0/rank-0.log").read_bytes()
    both = plain.stdout + plain.stderr
    assert sorted(log.replace(b"\n", b"")) == sorted(both.replace(b"\n", b"")), "only a torn line is ended"


@pytest.mark.e2e
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


@pytest.mark.e2e
def test_several_ranks_are_told_apart_or_filtered(tmp_path) -> None:
    say = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    script = tmp_path / "say.py"
    script.write_text(say)

    def lines(*options: str) -> tuple[list[str], list[str]]:
        done = forks.run(["-m", "ddprun", "--nproc-per-node", "2", *options, str(script)], env=os.environ, text=True)
        assert done.returncode == 0
        own = [line for line in done.stderr.splitlines() if not line.startswith("[node0] ")]
        return sorted(done.stdout.splitlines()), sorted(own)

    assert lines() == (["[node0 rank0] out 0", "[node0 rank1] out 1"], ["[node0 rank0] err", "[node0 rank1] err"])
    assert lines("--no-prefix") == (["out 0", "out 1"], ["err", "err"])
    assert lines("--local-ranks-filter", "1") == (["out 1"], ["err"])


@STARTS
@pytest.mark.e2e
def test_one_rank_has_the_terminal(tmp_path, options) -> None:
    """A debugger's prompt, input, the size, and its change."""
    session = Session([sys.executable, "-m", "ddprun", *options, str(SCRIPTS / "debug.py")], rows=33, columns=99)
    session.wait_for("terminals [True, True, True], 99 columns")
    session.wait_for("(Pdb) ")
    session.type("answer = 42\n")
    session.wait_for("(Pdb) ")
    session.type("continue\n")
    session.wait_for("the answer is 42")
    session.wait_for("name? ")
    session.resize(rows=40, columns=120)
    session.wait_for("now 120 columns")
    session.type("Ann\n")
    session.wait_for("hello Ann")
    assert session.end() == 0


@pytest.mark.e2e
def test_a_rank_that_is_killed_at_a_prompt_leaves_the_terminal_as_it_was() -> None:
    command = f'trap : INT; {sys.executable} -m ddprun {SCRIPTS / "debug.py"}; echo "ended $?"; /bin/stty -a'
    session = Session(["/bin/sh", "-c", command])
    session.wait_for("(Pdb) ")
    session.type("\x03")
    session.wait_for("to end")
    time.sleep(2 * SAME_REQUEST_S)
    session.type("\x03")
    session.wait_for("ended 137")
    session.wait_for(" icanon ")
    session.wait_for(" echo ")
    assert session.end() == 0


@pytest.mark.e2e
def test_one_of_several_ranks_is_debugged(tmp_path) -> None:
    """From a pipe: the others wait for it in a collective."""
    options = ("--nproc-per-node", "2", "--debug-rank", "1", "--run-dir", str(tmp_path / "run"))
    command = ["-m", "ddprun", *options, str(SCRIPTS / "debug.py")]
    done = forks.run(command, env=os.environ, given="answer = 42\ncontinue\nAnn\n", text=True)
    assert done.returncode == 0, done.stderr
    assert "[node0 rank0] the answer is 0" in done.stdout.splitlines()
    assert "(Pdb) (Pdb) the answer is 42\n" in done.stdout
    assert "name? hello Ann\n" in done.stdout
