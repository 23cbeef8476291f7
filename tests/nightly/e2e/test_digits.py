"""Trainings on several nodes of this machine: the same weights bit for bit, after a kill and in other placements."""

import json
import os
import re
import signal
from pathlib import Path

from tests import forks
from tests.e2e.driver import ddpctl, events_of, processes_of, wait_until


def fingerprint(output: str) -> str:
    return re.search(r"weights\s+sha256 ([0-9a-f]{16})", output)[1]  # type: ignore[index]


def undisturbed(tmp_path: Path, *options: str, ranks: int) -> str:
    """Train on one node, without ddpctl, and return the fingerprint."""
    node = ("-m", "ddprun", f"--nproc-per-node={ranks}", "--run-dir", f"{tmp_path}/undisturbed")
    done = forks.run(
        [*node, "-m", "ddptrain", *options, "--device=cpu"], env=os.environ, cwd=tmp_path, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return fingerprint(done.stdout)


def test_a_sharded_training_resumes_bit_for_bit_after_a_node_was_killed(tmp_path: Path) -> None:
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


def test_the_weights_of_four_ranks_do_not_depend_on_their_nodes() -> None:
    shapes = (("2", "2"), ("1", "4"))
    runs = [
        ddpctl("launch", "--nodes", nodes, "--gpus", gpus, "--", "--epochs", "1", "--deterministic")
        for nodes, gpus in shapes
    ]
    assert [run.returncode for run in runs] == [0, 0]
    assert len({fingerprint(run.stdout) for run in runs}) == 1
