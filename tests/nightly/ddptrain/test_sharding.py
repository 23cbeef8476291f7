"""Sharded trainings and their checkpoints: equal to DDP's, read by every strategy and world size, whole or noticed."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests import forks
from tests.messages import assert_names
from tests.ranks import Ended, Start
from tests.unit.ddptrain.test_sharding import write_shards

from ddptrain.checkpoint import (
    UnusableCheckpoint,
    data_files,
    load_checkpoint,
    manifest_path,
)
from ddptrain.config import parse_options
from ddptrain.distributed import RankInfo, check_strategy
from ddptrain.errors import TrainError
from ddptrain.memory_estimate import TrainingSize

STEPS = 8
TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(450))
SCRIPT = (str(Path(__file__).parent / "sharded.py"),)
KILLED = """
import os, random, signal, sys, time
from multiprocessing import Pipe
from pathlib import Path
import torch
from ddptrain.checkpoint import Checkpoint, Shard, load_checkpoint, whole, write_checkpoint
from ddptrain.checkpoint_directory import CheckpointDirectory

folder, kills, draw = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0)
torch.set_num_threads(1)

def write(number, pipe, first_step):
    def gather(value):
        if number:
            pipe.send(value)
            return None
        return [value, pipe.recv()]
    for step in range(first_step, first_step + 100_000):
        rows = torch.full((500, 40), float(step))
        parts = {"model": {"weight": {"rows": rows, "shape": [1000, 40]}}}
        path = folder / f"step-{step:08d}.pt"
        write_checkpoint(path, Checkpoint(step=step, shaping={}, parts=parts, accuracy=None),
                         shard=Shard(number=number, gather=gather))
        if number:
            pipe.send(None)
        else:
            pipe.recv()
            print(step, flush=True)

newest, good, finished = 0, 0, 0
for kill in range(kills):
    ends, (reading, writing) = Pipe(), os.pipe()
    pids = []
    for number in (0, 1):
        if not (pid := os.fork()):
            os.dup2(writing, 1)
            write(number, ends[number], newest + 1)
        pids.append(pid)
    os.close(writing)
    os.read(reading, 8)  # one is written, the next one is begun
    time.sleep(draw.random() * 0.02)
    for pid in draw.sample(pids, 2):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reading)
    for end in ends:
        end.close()
    parts = len(list(folder.glob(".step-*.part")))
    directory = CheckpointDirectory(folder)
    paths = directory.checkpoints()
    found = load_checkpoint(paths[0])  # the newest is never a half one
    good += bool((whole(found.parts["model"])["weight"] == found.step).all()) and found.step > newest
    finished += parts > 0
    assert not list(folder.glob(".step-*.part"))
    newest = found.step
    directory.delete_old(keep=1, keep_best=False, written=paths[0])
    directory.unlock()
print(good, finished)
"""

OPTIONS = ("--data=text", "--data-dir=text.txt", "--layers=2", "--width=32", "--heads=2", "--context=16")
OPTIONS += ("--batch-size=16", "--epochs=10", "--precision=fp32", "--clip=0.5", "--ema=0.9")


def test_killed_60_times_while_shards_are_written_the_newest_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    good, unfinished = map(int, done.stdout.split())
    assert good == 60
    assert unfinished > 0  # some kills came while a file was written


def test_the_strategies_agree_and_read_each_others_checkpoints(start: Start, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = (*OPTIONS, "--accumulate=2", "--batch-size=5")  # rank 0 has two parts of it, the others one
    ended = start("train", ".", str(STEPS), *options, "--recompute", size=4, node_size=2, command=SCRIPT).end()
    assert [rank.code for rank in ended] == [0] * 4, ended[0].err
    results = json.loads(ended[0].out)
    for strategy, shards in (("ddp", 1), ("fsdp", 4), ("hybrid", 2)):
        result = results[strategy]
        assert result["losses"] == pytest.approx(results["ddp"]["losses"], rel=1e-5)
        assert result["bits"] == pytest.approx(results["ddp"]["bits"], rel=1e-5)
        assert set(result["read by"].values()) == {result["digest"]}
        size = TrainingSize(num_parameters=42368, optimizer="adamw", dtype="fp32", shards_all=shards)
        expected = {quantity: size for quantity, size, _ in size.rows()}
        for measured in result["bytes"]:
            assert all(size == pytest.approx(expected[quantity], rel=0.1) for quantity, size in measured.items())
    for size in (1, 3):  # with 3 ranks, some rows are from two shards, and the last rank has fewer rows
        ended = start("read", ".", str(STEPS), *options, size=size, command=SCRIPT).end()
        assert set(json.loads(ended[0].out).values()) == {results["fsdp"]["digest"]}


def test_killed_ranks_go_on_to_the_same_weights(
    start: Start, train: Callable[..., list[Ended]], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = (*OPTIONS, "--epochs=2", "--strategy=fsdp", "--deterministic", "--checkpoint-every=3")
    undisturbed = train(*options, "--checkpoint-dir=whole", size=2)
    killed = start(*options, size=2)
    killed.wait_for("epoch  1/2")
    killed.kill()
    resumed = train(*options, size=2)
    assert "resumed from checkpoints/step-" in resumed[0].out
    assert resumed[0].fingerprint == undisturbed[0].fingerprint
    assert not re.search(r"^a step .*communication \d", resumed[0].out, re.M)  # it is not measured
    other = train(*options, "--optimizer=sgd", "--allow-changed-config", size=2)
    assert [rank.code for rank in other] == [78] * 2

    def command(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        done = forks.run(["-m", "ddptrain", *arguments], env=os.environ, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        return done

    command("export", "checkpoints", "weights.pt", "--part=model")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert sum(tensor.numel() for tensor in weights.values()) == 42368
    sample = ("sample", "checkpoints", "--bytes=20", "--prompt=7 times")
    texts = [command(*sample).stdout for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith(b"7 times")
    assert len(texts[0]) == len(b"7 times") + 20 + 1
    newest = max((tmp_path / "checkpoints").glob("step-*.shard-1"))
    newest.write_bytes(b"torn")
    warning = f"warning: checkpoints/{newest.with_suffix('.pt').name} is skipped"
    assert warning in command(*sample).stderr.decode()
    evaluated = train(
        *options, "--epochs=0", size=2
    )  # rank 1 verifies its shard, and rank 0 selects another checkpoint
    assert [rank.code for rank in evaluated] == [0] * 2, evaluated[0].err
    assert (
        f"resumed from checkpoints/{sorted((tmp_path / 'checkpoints').glob('step-*.pt'))[-1].name}" in evaluated[0].out
    )
    assert newest.with_name(f"{newest.name}.bad").exists()


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
def test_batch_normalization_in_bf16_has_the_losses_of_ddp(model: str, train: Callable[..., list[Ended]]) -> None:
    options = ("--data=synthetic", "--synthetic-shape=3x16x16", "--synthetic-samples=64", "--batch-size=32")
    losses = []
    for strategy in ("ddp", "fsdp"):
        how = (f"--strategy={strategy}", f"--model={model}", "--precision=bf16", "--epochs=1", "--device=cpu")
        ended = train(*options, *how, f"--checkpoint-dir={strategy}", size=2)
        assert [rank.code for rank in ended] == [0, 0], ended[0].err
        losses += map(float, re.findall(r"loss ([\d.]+)", ended[0].out))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_rows_of_several_shards_are_read_together(tmp_path: Path) -> None:
    weight = load_checkpoint(write_shards(tmp_path, 8)).parts["model"]["weight"]
    complete = torch.arange(10.0).view(10, 1) + 8
    for first in range(11):
        for last in range(first, 11):
            rows = complete[first:last]
            assert torch.equal(weight.copy_to(torch.full_like(rows, torch.nan), first), rows)


@pytest.mark.parametrize("given", ["--compile=default", "--compress=bf16", "--static-graph", "--sync-bn"])
def test_what_does_not_go_with_shards_is_refused(given: str) -> None:
    options = parse_options(["--strategy=fsdp", given], {})
    with pytest.raises(TrainError) as refused:
        check_strategy(options, RankInfo(rank=0, size=4))
    assert refused.value.code == 78
    assert_names(refused.value, "--strategy")


def test_100_corrupt_shards_are_all_noticed(tmp_path: Path) -> None:
    path = write_shards(tmp_path, 8)
    files = [*data_files(path), manifest_path(path)]
    draw, noticed = random.Random(0), 0
    for trial in range(100):
        file = files[trial % len(files)]
        before = file.read_bytes()
        damage = trial // len(files) % 4
        if damage == 0:
            file.unlink()
        elif damage == 1:
            file.write_bytes(before[: draw.randrange(len(before))])
        else:
            at, bit = draw.randrange(len(before)), 1 << draw.randrange(8)
            file.write_bytes(before[:at] + bytes([before[at] ^ bit]) + before[at + 1 :])
        try:
            load_checkpoint(path)
        except (UnusableCheckpoint, FileNotFoundError):
            noticed += 1
        file.write_bytes(before)
    assert noticed == 100
    assert load_checkpoint(path).step == 8
