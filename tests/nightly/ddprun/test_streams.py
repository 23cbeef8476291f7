"""A rank's stdin, stdout and stderr: apart, as they come where one rank is shown, and a terminal where there is one."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import forks
from tests.contract.ddprun.test_output import check_bytes_of_one_rank
from tests.nightly.ddprun.terminal import Session

from ddprun.ranks.termination import SAME_REQUEST_S

SCRIPTS = Path(__file__).parent / "scripts"
STARTS = pytest.mark.parametrize("options", [(), ("--exec",)], ids=["fork", "exec"])


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


def test_one_of_several_ranks_is_debugged(tmp_path) -> None:
    """From a pipe: the others wait for it in a collective."""
    options = ("--nproc-per-node", "2", "--debug-rank", "1", "--run-dir", str(tmp_path / "run"))
    command = ["-m", "ddprun", *options, str(SCRIPTS / "debug.py")]
    done = forks.run(command, env=os.environ, given="answer = 42\ncontinue\nAnn\n", text=True)
    assert done.returncode == 0, done.stderr
    assert "[node0 rank0] the answer is 0" in done.stdout.splitlines()
    assert "(Pdb) (Pdb) the answer is 42\n" in done.stdout
    assert "name? hello Ann\n" in done.stdout


WRITES = """
import sys
from ddprun.output.console import Console
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


def test_one_executed_rank_writes_the_bytes_that_python_writes(tmp_path) -> None:
    check_bytes_of_one_rank(tmp_path, "--exec")
