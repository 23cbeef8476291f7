"""A stop at any moment of a run, as bench/signals.py tries it fifty times; here three. Ctrl-C in a rank."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.driver import ROOT, SCRIPTS, ddpctl, start


def test_sigterm_at_a_random_moment_ends_a_run_with_143() -> None:
    command = [sys.executable, str(ROOT / "bench" / "signals.py"), "--moments", "3", "--seed", "7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *tries, last = done.stdout.splitlines()[1:]
    assert len(tries) == 3
    assert re.search(r"^3 of 3\b.*\b143\b", last)


INTERRUPTED = SCRIPTS / "interrupted.py"


@pytest.mark.parametrize("verb", ["launch", "attach"])
def test_ctrl_c_is_one_keyboard_interrupt_for_each_rank(tmp_path: Path, verb: str) -> None:
    """Rank 1 does not catch it."""
    (tmp_path / "script.py").write_text(INTERRUPTED.read_text())
    program = ("launch", "--nodes", "2", "--name", "night", "--", str(tmp_path / "script.py"))
    if verb == "attach":
        assert ddpctl(*program[:1], "--detach", *program[1:]).returncode == 0
        program = ("attach", "night")
    attached = start(*program)
    assert attached.stdout is not None
    ready = 0
    while ready < 2:
        line = attached.stdout.readline()
        assert line
        ready += line.endswith("] ready\n")
    os.killpg(attached.pid, signal.SIGINT)
    output, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, output
    assert (tmp_path / "runs/night/node-0/rank-0.log").read_text() == "ready\ninterrupted\nsaved\n"
    log = (tmp_path / "runs/night/node-1/rank-1.log").read_text()
    assert log.startswith("ready\nTraceback ")
    assert log.endswith("\nKeyboardInterrupt\n")
    state = json.loads(ddpctl("status", "night", "--json").stdout)
    assert (state["state"], state["code"]) == ("stopped", 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_attached_launch_that_is_ended_waits_until_its_ranks_have_saved(tmp_path: Path, number: int) -> None:
    text = INTERRUPTED.read_text()
    (tmp_path / "script.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n" + text + "raise SystemExit(143)\n"
    )
    attached = start("launch", "--name", "night", "--", str(tmp_path / "script.py"))
    assert attached.stdout is not None
    while not attached.stdout.readline().endswith("ready\n"):
        assert attached.poll() is None
    attached.send_signal(number)
    output, _ = attached.communicate(timeout=90)
    assert attached.returncode == 143, output
    assert "saved\n" in output
    state = json.loads(ddpctl("status", "night", "--json").stdout)
    assert state["state"] == "stopped"
    assert state["message"].startswith(f"stopped by {signal.Signals(number).name} to ddpctl")
