"""Training on real digits over simulated nodes: accuracy, metrics, resume, and the same weights bit for bit."""

import json
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.road.driver import ddpctl, node_log, processes_of, start, wait_until

SLOW = ("--epochs", "400")  # long enough to be looked at; every test stops it


def fingerprint(output: str) -> str:
    return re.search(r"weights\s+sha256 ([0-9a-f]{16})", output)[1]  # type: ignore[index]


def test_two_nodes_reach_98_percent_and_say_so() -> None:
    done = ddpctl("launch", "--nodes", "2", "--gpus", "2", "--name", "digits", "--", "--epochs", "10")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    accuracy = float(re.search(r"accuracy\s+([0-9.]+) %", output)[1])  # type: ignore[index]
    assert accuracy >= 98.0
    assert re.search(r"world size\s+4\b", output)
    assert re.search(r"images/s", output)
    assert "run digits succeeded, after " in output
    status = json.loads(ddpctl("status", "digits", "--json").stdout)
    assert (status["state"], status["code"], status["outcome"]["cause"]) == ("succeeded", 0, "ok")


def test_every_node_answers_with_its_ranks_metrics(tmp_path: Path) -> None:
    name = ddpctl("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", "scraped", "--", *SLOW).stdout.strip()
    assert name == "scraped"
    wait_until(lambda: "epoch" in node_log(tmp_path, name), "the first epoch")
    reports = json.loads(ddpctl("status", name, "--json").stdout)["node_reports"]
    assert len({report["state"]["metrics"] for report in reports}) == 2
    for report in reports:
        with urllib.request.urlopen(report["state"]["metrics"], timeout=5) as answer:  # noqa: S310
            text = answer.read().decode()
        ranks = [rank["rank"] for rank in report["state"]["ranks"]]
        assert ranks == [report["node"] * 2, report["node"] * 2 + 1]
        for rank in ranks:
            steps = re.search(rf'^ddp_steps_total{{rank="{rank}"}} ([0-9.]+)$', text, re.M)
            assert steps
            assert float(steps[1]) > 0
        assert re.search(r"^ddp_ranks_alive 2\.0$", text, re.M)
        assert "pid=" not in text
    stopped = ddpctl("stop", name)
    assert stopped.returncode == 0
    assert "run scraped stopped, exit code 143: stopped by SIGTERM: " in stopped.stderr
    assert processes_of(name) == {}
    assert json.loads(ddpctl("status", name, "--json").stdout)["code"] == 143


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    command = ("--", "--epochs", "20", "--deterministic")
    whole = ddpctl("launch", "--nodes", "2", "--gpus", "1", "--name", "whole", *command)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    ddpctl("launch", "-d", "--nodes", "2", "--gpus", "1", "--name", "cut", *command)
    wait_until(lambda: re.search(r"epoch\s+1/20", node_log(tmp_path, "cut")), "the first epoch")
    killed = ddpctl("stop", "cut", "--kill")
    assert (killed.returncode, killed.stderr) == (
        0,
        "run cut stopped, exit code 137: killed on request, without saving\n"
        "  go on with   ddpctl launch --resume cut\n",
    )
    assert processes_of("cut") == {}

    again = ddpctl("launch", "--resume", "cut", "--name", "again")
    assert again.returncode == 0, again.stdout + again.stderr
    resumed = re.search(r"resumed from (\S+)/step-(\d+)\.pt: going on at step (\d+) of (\d+)", again.stdout)
    assert resumed
    assert Path(resumed[1]) == tmp_path / "runs/cut/checkpoints"
    assert int(resumed[3]) == int(resumed[2]) + 1 > 40
    assert fingerprint(again.stdout) == fingerprint(whole.stdout)


def test_the_same_weights_bit_for_bit() -> None:
    """Twice in a row, and however the four ranks are spread."""
    shapes = (("2", "2"), ("2", "2"), ("1", "4"))
    runs = [
        ddpctl("launch", "--nodes", nodes, "--gpus", gpus, "--", "--epochs", "2", "--deterministic")
        for nodes, gpus in shapes
    ]
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert len({fingerprint(run.stdout) for run in runs}) == 1


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_once_saves_twice_kills(tmp_path: Path, times: int) -> None:
    process = start("launch", "--nodes", "2", "--gpus", "1", "--name", "interrupted", "--", *SLOW)
    wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "interrupted")), "the second epoch")
    process.send_signal(signal.SIGINT)
    lines = []
    while not lines or "Ctrl-C again kills them" not in lines[-1]:
        lines.append(process.stdout.readline())  # type: ignore[union-attr]
    if times == 2:
        process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    output = "".join(lines) + rest
    assert processes_of("interrupted") == {}
    assert process.returncode == 130, output
    if times == 2:
        assert "killing interrupted" in output
    else:
        assert "run interrupted stopped, exit code 143, after " in output
        assert "ddpctl launch --resume interrupted" in output
