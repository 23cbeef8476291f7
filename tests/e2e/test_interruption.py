"""Ctrl-C once and twice, and SIGKILL of each of the processes of a run: what ends how, and that nothing is left."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from tests.e2e.driver import (
    SCRIPTS,
    events_of,
    is_over,
    node_log,
    outcome_of,
    processes_of,
    start,
    status_of,
    wait_until,
)
from tests.in_process import ddpctl as in_process

IDLE = str(SCRIPTS / "idle.py")


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


def test_a_second_ctrl_c_kills_ranks_that_are_saving(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text((SCRIPTS / "interrupted.py").read_text().replace("sleep(2)", "sleep(200)"))
    attached = start("launch", "--nodes", "2", "--name", "night", "--", str(script))
    assert attached.stdout is not None
    for line_end in ("rank1] ready\n", "rank0] interrupted\n"):
        while not attached.stdout.readline().endswith(line_end):
            assert attached.poll() is None
        if line_end.startswith("rank1"):
            wait_until(lambda: "ready" in node_log(tmp_path, "night"), "rank 0")
        os.killpg(attached.pid, signal.SIGINT)
    output, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, output
    assert "saved" not in node_log(tmp_path, "night")
    assert processes_of("night") == {}
    assert status_of("night")["state"] == "stopped"


def ranks_up(tmp_path: Path, run: str) -> int:
    return sum(len(re.findall(r"rank \d of \d idles", node_log(tmp_path, run, node))) for node in (0, 1))


@pytest.mark.parametrize("victim", ["ddpctl", "ddprun", "rank"])
def test_nothing_is_left_after_sigkill(tmp_path: Path, victim: str) -> None:
    """Each rank has a child in a session of its own."""
    (tmp_path / "once.yaml").write_text("job: {max_restarts: 0}\n")
    options = ("-f", f"{tmp_path}/once.yaml", "--nodes", "2", "--gpus", "2", "--name", "killed")
    process = start("launch", *options, "--", IDLE)
    wait_until(lambda: ranks_up(tmp_path, "killed") == 4, "four ranks")
    wait_until(lambda: all(report["state"]["ranks"] for report in status_of("killed")["node_reports"]), "their records")
    state = status_of("killed")["node_reports"][0]["state"]
    pid = {"ddpctl": process.pid, "ddprun": state["pid"], "rank": state["ranks"][1]["pid"]}[victim]
    os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: is_over("killed"), "the run's end", timeout_s=45)
    assert process.returncode == (-9 if victim == "ddpctl" else 137)
    status = status_of("killed")
    if victim == "rank":
        assert (status["outcome"]["cause"], status["outcome"]["rank"], status["outcome"]["node"]) == ("killed", 1, 0)
    if victim == "ddpctl":
        assert (status["state"], status["code"]) == ("stopped", 143)
