"""Scripts of users: unchanged as torchrun runs them, what they observe under both, a loop that saves, a debugger."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from difflib import ndiff
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import DDPCTL, ROOT, ddpctl, outcome_of, wait_until
from tests.nightly.e2e.torchrun_launches import CASES, observe_all, rows_of_page

EXAMPLES = ROOT / "examples"


def test_a_script_written_for_torchrun_trains_unchanged_on_two_nodes() -> None:
    script = str(EXAMPLES / "plain_ddp.py")
    done = ddpctl("launch", "--nodes", "2", "--gpus", "2", "--name", "plain", "--", script, "--epochs", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^\[node0 rank0\] epoch \d/3 loss ([0-9.]+) on 4 ranks$", done.stdout, re.M)
    assert len(losses) == 3
    assert float(losses[2]) < 0.5 * float(losses[0])


def test_a_script_observes_what_docs_torchrun_md_says(tmp_path: Path) -> None:
    """One launch of the page's; tests/nightly/e2e has the others."""
    name = "two ranks"
    rows = observe_all(name, CASES[name], tmp_path)
    assert len(rows) >= 10
    assert {row: cells for row, cells in rows_of_page().items() if row.startswith(f"{name}: ")} == rows


def test_a_plain_loop_with_six_more_lines_saves_on_sigterm_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = ((EXAMPLES / f"loop_{when}.py").read_text().splitlines()[4:] for when in ("before", "after"))
    changes = [line for line in ndiff(before, after) if line.strip("+- ") and line[0] in "+-"]
    assert (len([line for line in changes if line[0] == "+"]), len(changes)) == (7, 9)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_dir = tmp_path / "runs" / "loop"

    def ddprun(epochs: int) -> subprocess.Popen[str]:
        options = ("--run-id", "loop", "--run-dir", str(run_dir), "--nproc-per-node", "2")
        shape = ("--steps", "500", "--epochs", str(epochs))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = ["-m", "ddprun", *options, str(EXAMPLES / "loop_after.py"), *shape]
        return forks.start(command, env=os.environ, **pipes)

    process = ddprun(1000)
    log = run_dir / "node-0" / "rank-0.log"
    wait_until(lambda: log.exists() and "epoch 1/" in log.read_text(), "the first epoch")
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    outcome = outcome_of(tmp_path, "loop")
    assert (outcome.code, outcome.cause, outcome.node) == (143, "stopped", 0)
    epochs = len(re.findall(r"epoch \d+/1000 loss", output))

    again = ddprun(epochs + 1)
    output, _ = again.communicate(timeout=180)
    assert again.returncode == 0, output
    step = int(re.findall(r"rank 0 continues after step (\d+)", output)[0])
    assert epochs * 500 <= step < (epochs + 1) * 500
    assert re.findall(r"epoch (\d+)/", output) == [str(epochs + 1)]


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
