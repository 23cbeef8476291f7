"""Trainings of ddptrain on real digits and on text: accuracy, exported weights, and resumption after kills."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from tests import forks
from tests.e2e.driver import (
    ROOT,
    ddpctl,
    events_of,
    is_over,
    node_log,
    outcome_of,
    processes_of,
    status_of,
    wait_until,
)  # fmt: skip
from tests.in_process import ddpctl as in_process

pytestmark = pytest.mark.timeout(900)
GUIDE = (ROOT / "docs" / "checkpoints.md").read_text()
EXPORTS = re.findall(r"^ddpctl export .*$", GUIDE, re.M)
PREDICT = (ROOT / "examples" / "predict.py").read_text()
# What torch.onnx begins with, which needs no further package.
TRACE = "torch.export.export(classifier, (images[:2],), dynamic_shapes=({0: torch.export.Dim('batch')},))"


def fingerprint(output: str) -> str:
    """Return the hash of the weights that ddptrain has printed."""
    return re.findall(r"weights\s+sha256 ([0-9a-f]{16})", output)[-1]


def train_undisturbed(tmp_path: Path, *options: str, ranks: int) -> str:
    """Train on one node without ddpctl, and return the output."""
    node = ("-m", "ddprun", f"--nproc-per-node={ranks}", "--run-dir", f"{tmp_path}/undisturbed")
    done = forks.run(
        [*node, "-m", "ddptrain", *options, "--device=cpu"], env=os.environ, cwd=tmp_path, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def python(folder: Path, *blocks: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-c", "\n".join(blocks)], cwd=folder, env=os.environ, text=True, timeout=300)


def test_two_nodes_of_two_ranks_reach_98_percent_and_their_weights_are_exported(tmp_path: Path) -> None:
    """The run of `make demo`, what is seen of it afterward, and the guide to its weights."""
    done = ddpctl("launch", "-f", str(ROOT / "examples/digits.yaml"), "--device", "cpu", "--name", "digits")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    (accuracy,) = re.findall(r"accuracy\s+([0-9.]+) %", output)
    assert float(accuracy) >= 98.0
    assert re.search(r"world size\s+4\b", output)
    status = status_of("digits")
    assert (status["state"], status["code"], status["outcome"]["cause"]) == ("succeeded", 0, "ok")

    top = json.loads(in_process("top", "digits", "--json").stdout)
    assert 0 < top["goodput"] < 1
    document = json.loads(in_process("timeline", "digits", "--json").stdout)
    spans = document["spans"]
    assert [before["end"] for before in spans[:-1]] == [after["begin"] for after in spans[1:]]
    assert document["seconds"].keys() >= {"start", "preflight", "rendezvous", "import", "training", "end"}
    assert in_process("report", "digits", "--output", str(tmp_path / "digits.html")).returncode == 0
    page = (tmp_path / "digits.html").read_text()
    (goodput,) = re.findall(r"<b>(\d+) %</b><span>goodput", page)
    assert int(goodput) == round(100 * top["goodput"])
    assert page.count("<svg") >= 4  # of the loss, throughput, the step and the accuracy

    printed = [ddpctl(*shlex.split(line, comments=True)[1:], cwd=tmp_path) for line in EXPORTS]
    assert [export.returncode for export in printed] == [0, 0], printed
    (as_exported,) = re.findall(r"test accuracy ([\d.]+) %", printed[0].stdout)
    assert as_exported == accuracy
    assert (tmp_path / "weights.safetensors").stat().st_size > 100_000
    done = python(tmp_path, PREDICT, f"print({TRACE}.module()(images[:5]).shape)")
    assert done.returncode == 0, done.stderr
    (predicted,) = re.findall(r"test accuracy ([\d.]+) %", done.stdout)
    # Predictions in float32 may differ in an image, or two of 360, from those of the training.
    assert abs(float(predicted) - float(as_exported)) < 0.6
    assert done.stdout.splitlines()[-1:] == ["torch.Size([5, 10])"], done.stderr


def test_after_a_killed_rank_and_a_killed_run_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    options = ("--epochs", "12", "--deterministic")
    # Two ranks would hide the order in which gradients are added.
    undisturbed = train_undisturbed(tmp_path, *options, ranks=3)

    assert ddpctl("launch", "-d", "--nodes", "1", "--gpus", "3", "--name", "cut", "--", *options).returncode == 0
    wait_until(lambda: events_of(tmp_path, "cut", "checkpoint_saved"), "the first checkpoint")
    ranks = status_of("cut")["node_reports"][0]["state"]["ranks"]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    wait_until(lambda: events_of(tmp_path, "cut", "checkpoint_loaded"), "the restart from the checkpoint")
    loaded = events_of(tmp_path, "cut", "checkpoint_loaded")[0].step
    wait_until(lambda: re.search(r"epoch\s+[4-9]/12", node_log(tmp_path, "cut")), "the fourth epoch")
    assert ddpctl("stop", "cut", "--kill").returncode == 0
    assert processes_of("cut") == {}
    assert (status_of("cut")["state"], status_of("cut")["code"]) == ("stopped", 137)

    again = ddpctl("launch", "--resume", "cut", "--name", "again")
    assert again.returncode == 0, again.stdout + again.stderr
    (resumed,) = events_of(tmp_path, "again", "checkpoint_loaded")
    assert resumed.step is not None
    assert resumed.step > loaded >= 40
    assert resumed.facts["path"] == f"{tmp_path}/runs/cut/checkpoints/step-{resumed.step:08}.pt"
    assert fingerprint(again.stdout) == fingerprint(undisturbed)


def test_shards_of_a_killed_node_resume_bit_for_bit_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(600)))
    options = ("--strategy=fsdp", "--data=text", f"--data-dir={tmp_path}/text.txt", "--layers=2", "--width=32")
    options += ("--context=16", "--batch-size=16", "--epochs=2", "--deterministic", "--checkpoint-every=5")
    undisturbed = train_undisturbed(tmp_path, *options, ranks=2)

    (tmp_path / "once.yaml").write_text("job: {max_restarts: 0}\n")
    launch = ("launch", "-d", "-f", f"{tmp_path}/once.yaml", "--nodes", "2", "--gpus", "1", "--name", "cut")
    assert ddpctl(*launch, "--", *options).returncode == 0
    checkpoints = tmp_path / "runs/cut/checkpoints"
    wait_until(lambda: len(list(checkpoints.glob("step-*.json"))) > 1, "two checkpoints", timeout_s=300)
    (_, second) = status_of("cut")["node_reports"]
    os.kill(second["state"]["pid"], signal.SIGKILL)
    wait_until(lambda: is_over("cut"), "the other node to end", timeout_s=120)
    assert outcome_of(tmp_path, "cut").code == status_of("cut")["code"] == 137
    assert len(list(checkpoints.glob("step-*.shard-1"))) == len(list(checkpoints.glob("step-*.pt")))

    shutil.copytree(checkpoints, tmp_path / "killed")

    again = ddpctl("launch", "--resume", "cut", "--name", "again", timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert fingerprint(again.stdout) == fingerprint(undisturbed)
    single = ddpctl("launch", "--name", "single", "--", *options, f"--checkpoint-dir={tmp_path}/killed", timeout=600)
    assert single.returncode == 0, single.stdout + single.stderr
    steps = [events_of(tmp_path, run, "checkpoint_loaded")[0].step for run in ("again", "single")]
    assert steps[0] == steps[1]
    assert steps[0] >= 5
    weights = []
    for folder in ("undisturbed", "killed"):
        done = forks.run(["-m", "ddptrain", "export", folder, "weights.pt"], env=os.environ, cwd=tmp_path, text=True)
        assert done.returncode == 0, done.stderr
        weights.append(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():  # another number of ranks adds in another order
        assert torch.allclose(tensor, weights[1][name], rtol=1e-3, atol=1e-4), name
