"""Training on real digits over simulated nodes: accuracy, metrics, resume, and the same weights bit for bit."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from tests import forks
from tests.e2e.driver import ddpctl, end_of, events_of, node_log, processes_of, start, wait_until
from tests.wording import Wording

SLOW = ("--epochs", "400")  # long enough to be looked at; every test stops it


def fingerprint(output: str) -> str:
    return re.search(r"weights\s+sha256 ([0-9a-f]{16})", output)[1]  # type: ignore[index]


def undisturbed(tmp_path: Path, *options: str, ranks: int) -> str:
    """Train on one node, without ddpctl, and return the fingerprint: see test_the_same_weights_bit_for_bit."""
    node = ("-m", "ddprun", f"--nproc-per-node={ranks}", "--run-dir", f"{tmp_path}/undisturbed")
    done = forks.run(
        [*node, "-m", "ddptrain", *options, "--device=cpu"], env=os.environ, cwd=tmp_path, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return fingerprint(done.stdout)


def test_two_nodes_reach_98_percent(wording: Wording) -> None:
    done = ddpctl("launch", "--nodes", "2", "--gpus", "2", "--name", "digits", "--", "--epochs", "10")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    accuracy = float(re.search(r"accuracy\s+([0-9.]+) %", output)[1])  # type: ignore[index]
    assert accuracy >= 98.0
    assert re.search(r"world size\s+4\b", output)
    assert re.search(r"images/s", output)
    status = json.loads(ddpctl("status", "digits", "--json").stdout)
    assert (status["state"], status["code"], status["outcome"]["cause"]) == ("succeeded", 0, "ok")
    wording(end_of("digits", done.stderr))


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path, wording: Wording) -> None:
    """On one node; of several nodes: the test after this one."""
    command = ("--epochs", "12", "--deterministic")
    whole = undisturbed(tmp_path, *command, ranks=3)  # two ranks would hide the order in which gradients are added

    ddpctl("launch", "-d", "--nodes", "1", "--gpus", "3", "--name", "cut", "--", *command)
    wait_until(lambda: re.search(r"epoch\s+1/12", node_log(tmp_path, "cut")), "the first epoch")
    killed = ddpctl("stop", "cut", "--kill")
    assert killed.returncode == 0
    wording(killed.stderr)
    assert processes_of("cut") == {}

    again = ddpctl("launch", "--resume", "cut", "--name", "again")
    assert again.returncode == 0, again.stdout + again.stderr
    (loaded,) = events_of(tmp_path, "again", "checkpoint_loaded")
    assert loaded.step is not None
    assert loaded.step >= 40
    path = tmp_path / f"runs/cut/checkpoints/step-{loaded.step:08}.pt"
    assert loaded.facts["path"] == str(path)
    (line,) = re.findall(rf"resumed from .* step {loaded.step + 1} .*", again.stdout)
    wording(re.sub(r"step-\d+|step \d+|epoch \d+", lambda found: re.sub(r"\d+", "{number}", found[0]), line))
    assert fingerprint(again.stdout) == whole

    done = ddpctl("export", "again", cwd=tmp_path)  # its checkpoints are in the folder of the first run
    assert done.returncode == 0, done.stderr
    assert "/cut/checkpoints/step-00000540.pt" in done.stdout
    assert torch.load(tmp_path / "weights.pt", weights_only=True)


def test_a_sharded_training_goes_on_from_shards_when_a_node_was_killed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(600)))
    options = ("--strategy=fsdp", "--data=text", f"--data-dir={tmp_path}/text.txt", "--layers=2", "--width=32")
    options += ("--context=16", "--batch-size=16", "--epochs=2", "--deterministic", "--checkpoint-every=5")
    whole = undisturbed(tmp_path, *options, ranks=2)

    config = tmp_path / "once.yaml"
    config.write_text("job: {max_restarts: 0}\n")
    ddpctl("launch", "-d", "-f", str(config), "--nodes", "2", "--gpus", "1", "--name", "cut", "--", *options)
    checkpoints = tmp_path / "runs/cut/checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("step-*.json"))) > 1, "two checkpoints", timeout_s=300)
    (_, second) = json.loads(ddpctl("status", "cut", "--json").stdout)["node_reports"]
    os.kill(second["state"]["pid"], signal.SIGKILL)
    wait_until(lambda: not processes_of("cut"), "the other node to end", timeout_s=120)
    assert json.loads(ddpctl("status", "cut", "--json").stdout)["code"] == 137

    again = ddpctl("launch", "--resume", "cut", "--name", "again", timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    (loaded,) = events_of(tmp_path, "again", "checkpoint_loaded")
    assert loaded.step is not None
    assert loaded.step >= 5
    assert len(list(checkpoints.glob("step-*.shard-1"))) == len(list(checkpoints.glob("step-*.pt")))
    assert fingerprint(again.stdout) == whole


def test_the_same_weights_bit_for_bit() -> None:
    """However the four ranks are spread. Twice in a row: test_distributed.py of ddptrain."""
    shapes = (("2", "2"), ("1", "4"))
    runs = [
        ddpctl("launch", "--nodes", nodes, "--gpus", gpus, "--", "--epochs", "1", "--deterministic")
        for nodes, gpus in shapes
    ]
    assert [run.returncode for run in runs] == [0, 0]
    assert len({fingerprint(run.stdout) for run in runs}) == 1


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
def test_ctrl_c_once_saves_twice_kills(tmp_path: Path, times: int, wording: Wording) -> None:
    process = start("launch", "--nodes", "2", "--gpus", "1", "--name", "interrupted", "--", *SLOW)
    wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "interrupted")), "the second epoch")
    process.send_signal(signal.SIGINT)
    lines = []
    while not lines or "Ctrl-C" not in lines[-1]:
        lines.append(process.stdout.readline())  # type: ignore[union-attr]
    if times == 2:
        process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    output = "".join(lines) + rest
    assert processes_of("interrupted") == {}
    assert process.returncode == 130, output
    outcome = json.loads(ddpctl("status", "interrupted", "--json").stdout)["outcome"]
    assert outcome["cause"] == "stopped"
    wording(lines[-1])
    if times == 2:
        (killing,) = [line for line in rest.splitlines() if line.startswith("killing ")]
        wording(killing)
    else:
        assert outcome["code"] == 130
        wording(end_of("interrupted", rest))
        assert "ddpctl launch --resume interrupted" in rest
