"""Ctrl-C once and twice, and SIGKILL of each of the processes of a run: what ends how, and that nothing is left."""

import json
import os
import re
import signal
from pathlib import Path

from tests.e2e.driver import (
    events_of,
    node_log,
    outcome_of,
    processes_of,
    start,
    status_of,
    wait_until,
)
from tests.in_process import ddpctl as in_process


def test_ctrl_c_saves_a_checkpoint_of_the_last_step_and_ends_all(tmp_path: Path) -> None:
    process = start("launch", "--nodes", "2", "--gpus", "1", "--name", "interrupted", "--", "--epochs", "400")
    wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "interrupted")), "the second epoch")
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert processes_of("interrupted") == {}
    outcome = outcome_of(tmp_path, "interrupted")
    assert (outcome.code, outcome.cause) == (130, "stopped")
    assert (status_of("interrupted")["state"], status_of("interrupted")["code"]) == ("stopped", 130)
    saved = [event.step for event in events_of(tmp_path, "interrupted", "checkpoint_saved")]
    checkpoints = sorted(path.name for path in (tmp_path / "runs/interrupted/checkpoints").glob("step-*.pt"))
    assert checkpoints[-1] == f"step-{saved[-1]:08}.pt"
    last = json.loads(in_process("top", "interrupted", "--json").stdout)["step"]
    assert saved[-1] == last
    assert "ddpctl launch --resume interrupted" in output
