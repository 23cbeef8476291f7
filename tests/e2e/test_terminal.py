"""ddpctl in a terminal: its only rank reads from it."""

import os
import pty
import select
import signal
import time
from pathlib import Path

from tests.e2e.driver import DDPCTL

SCRIPT = """\
x = 41
breakpoint()
print("x is", x)
"""


def read_until(terminal: int, text: str, limit_s: float = 60) -> str:
    """What the terminal shows, up to ``text``."""
    shown, deadline = b"", time.monotonic() + limit_s
    while text.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"waited {limit_s} s for {text!r}: {shown.decode()}"
        shown += os.read(terminal, 1 << 16)
    return shown.decode()


def test_breakpoint_in_an_attached_launch_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    child, terminal = pty.fork()
    if not child:
        os.execv(DDPCTL[0], (*DDPCTL, "launch", "--name", "night", "--", str(tmp_path / "script.py")))  # noqa: S606
    try:
        read_until(terminal, "(Pdb) ")
        os.write(terminal, b"x += 1\n")
        read_until(terminal, "(Pdb) ")
        os.write(terminal, b"continue\n")
        assert "x is 42" in read_until(terminal, "run 'night' succeeded")
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        os.close(terminal)
