"""The executor, with real processes."""

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.test_executor import PYTHON

READER = """
import os, sys
print(os.getsid(0) != os.getsid(os.getppid()), sys.stdin.isatty(), flush=True)
print("read " + repr(sys.stdin.readline()), flush=True)
"""


LENDER = """
import os, sys, time
from ddpctl.command import Command
from ddpctl.execution.executor import Executor
def verb():
    argv = (sys.executable, "-c", sys.argv[1])
    yield (Command(argv=argv, mode="background", output=sys.argv[2], stdin_inherited=True),)
assert os.tcgetpgrp(0) == os.getpgrp()  # the terminal is this process'
Executor(os.environ, has_stdin=sys.argv[3] == "stdin").perform(verb())
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("has", "written"),
    [("stdin", "True True\nread 'a line\\n'\n"), ("none", "True False\nread ''\n")],
)
def test_a_background_command_reads_from_the_terminal_of_its_launcher(tmp_path: Path, has: str, written: str) -> None:
    """It is in another session, so the terminal is not its controlling one; an executor without stdin lends none."""
    log = tmp_path / "log"
    child, terminal = pty.fork()
    if not child:
        os.execv(PYTHON, (PYTHON, "-c", LENDER, READER, str(log), has))  # noqa: S606
    try:
        os.write(terminal, b"a line\n")
        until(lambda: log.exists() and log.read_text() == written, 20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def test_ctrl_c_while_a_command_streams_calls_on_interrupt(tmp_path: Path) -> None:
    """The command continues; each Ctrl-C is one call."""
    code = """
import os, sys, threading, time, signal
from pathlib import Path
from ddpctl.command import Command
from ddpctl.execution.executor import Executor
times = []
def wait(true):
    deadline = time.monotonic() + 20
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
def child():
    Path("up").touch()
    wait(Path("go").exists)
    print("whole", flush=True)
def verb():
    yield (Command(argv=(sys.executable, __file__, "child"), mode="stream", timeout_s=None),)
def interrupt():
    wait(Path("up").exists)
    for number in (1, 2):
        os.kill(os.getpid(), signal.SIGINT)
        wait(lambda: len(times) == number)
    Path("go").touch()
if sys.argv[1:]:
    sys.exit(child())
threading.Thread(target=interrupt).start()
Executor(os.environ).perform(verb(), on_interrupt=lambda _: times.append(1))
print(len(times))
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([PYTHON, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("whole\n2\n", "")
