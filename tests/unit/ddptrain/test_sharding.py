"""Sharded trainings and their checkpoints: equal to DDP's, read by every strategy and world size, whole or noticed."""

import errno
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forks
from tests.unit.ddptrain.conftest import Ended, Start
from tests.wording import Wording

from ddptrain import checkpoint as checkpoint_format
from ddptrain.checkpoint import (
    Checkpoint,
    Shard,
    UnusableCheckpoint,
    data_files,
    load_checkpoint,
    manifest_path,
    whole,
    write_checkpoint,
)
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.config import parse_options
from ddptrain.distributed import RankInfo, check_strategy
from ddptrain.errors import TrainError
from ddptrain.export import choose_checkpoint
from ddptrain.memory_estimate import TrainingSize

NUM_SHARDS = 4
STEPS = 8
TEXT = " ".join(f"{n} times {n} is {n * n}." for n in range(450))
OPTIONS = ("--data=text", "--data-dir=text.txt", "--layers=2", "--width=32", "--heads=2", "--context=16")
OPTIONS += ("--batch-size=16", "--epochs=10", "--precision=fp32", "--clip=0.5", "--ema=0.9")
SCRIPT = (str(Path(__file__).parent / "sharded.py"),)


def write_shards(folder: Path, step: int) -> Path:
    """Save a checkpoint of one tensor of 10 rows, and of one that is not sharded, by a thread for each shard.

    Raise the first writer's error.
    """
    path = CheckpointDirectory(folder).path(step)
    failed: dict[int, OSError] = {}
    values: list[Any] = [None] * NUM_SHARDS
    barrier = threading.Barrier(NUM_SHARDS)

    def write(number: int) -> None:
        def gather(value: Any) -> list[Any] | None:
            values[number] = value
            barrier.wait(60)
            return list(values) if number == 0 else None

        rows = torch.arange(10.0).view(10, 1).chunk(NUM_SHARDS)[number] + step
        parts = {"model": {"weight": {"rows": rows, "shape": [10, 1]}, "count": torch.tensor(step)}}
        checkpoint = Checkpoint(step=step, shaping={}, parts=parts, accuracy=None)
        try:
            write_checkpoint(path, checkpoint, shard=Shard(number=number, gather=gather))
        except OSError as error:
            failed[number] = error

    threads = [threading.Thread(target=write, args=(number,)) for number in range(NUM_SHARDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if 0 in failed:
        raise failed[0]
    return path


def test_a_tensor_in_shards_is_read_whole(tmp_path: Path) -> None:
    path = write_shards(tmp_path, 8)
    assert [file.name for file in data_files(path)] == [
        "step-00000008.pt",
        *(f"step-00000008.shard-{number}" for number in range(1, NUM_SHARDS)),
    ]
    found = whole(load_checkpoint(path).parts["model"])
    assert torch.equal(found["weight"], torch.arange(10.0).view(10, 1) + 8)
    assert int(found["count"]) == 8
    assert {choose_checkpoint(file, best=False)[0] for file in (*data_files(path), manifest_path(path))} == {path}


@pytest.mark.parametrize(
    ("broken", "read_only"),
    [("pt", False), ("shard-2", False), ("shard-2", True), ("folder", False)],
    ids=["shard-0", "shard-2", "read-only", "folder"],
)
def test_a_write_that_fails_leaves_no_file_and_lets_no_writer_wait(
    tmp_path: Path, broken: str, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data, unlink = checkpoint_format._write_data, Path.unlink

    def fail(number: int) -> Any:
        raise OSError(number, os.strerror(number))

    def write(part: Path, *args: Any) -> tuple[int, str]:
        if part.name == f".step-00000008.{broken}.part":
            part.write_bytes(b"half")
            fail(errno.EIO)
        return write_data(part, *args)

    def unlink_or_fail(file: Path, **options: bool) -> None:
        if file.suffix == ".part" and file.exists():
            fail(errno.EROFS)
        unlink(file, **options)

    monkeypatch.setattr(checkpoint_format, "_write_data", write)
    if broken == "folder":
        monkeypatch.setattr(checkpoint_format, "sync_folder", lambda _: fail(errno.EIO))
    if read_only:
        monkeypatch.setattr(Path, "unlink", unlink_or_fail)
    expected = os.strerror(errno.EROFS if read_only else errno.EIO)
    with pytest.raises(OSError, match=expected):  # not BrokenBarrierError, of one that waited for the others
        write_shards(tmp_path, 8)
    if read_only:  # the next start removes them
        monkeypatch.setattr(Path, "unlink", unlink)
        (tmp_path / ".lock").unlink()
        CheckpointDirectory(tmp_path)
    assert not list(tmp_path.glob("*step-*"))


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


def test_old_and_corrupt_ones_go_with_all_their_shards(tmp_path: Path) -> None:
    paths = [write_shards(tmp_path, step) for step in (4, 8, 12)]
    (tmp_path / ".shared-0").touch()  # of a training that was killed as it started
    directory = CheckpointDirectory(tmp_path)
    assert not list(tmp_path.glob(".shared-*"))
    assert directory.delete_old(keep=2, keep_best=False, written=paths[2]) == 2
    directory.set_aside(paths[1])
    left = sorted(file.name for file in tmp_path.glob("step-*"))
    shards = [f"shard-{number}" for number in range(1, NUM_SHARDS)]
    assert left == sorted(
        [f"step-00000012.{end}" for end in ("json", "pt", *shards)]
        + [f"step-00000008.{end}.bad" for end in ("json", "pt", *shards)]
    )
    assert directory.num_bad() == 1


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


@pytest.mark.e2e
def test_killed_60_times_while_shards_are_written_the_newest_is_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stderr == ""
    good, unfinished = map(int, done.stdout.split())
    assert good == 60
    assert unfinished > 0  # some kills came while a file was written


@pytest.mark.parametrize("given", ["--compile=default", "--compress=bf16", "--static-graph", "--sync-bn"])
def test_what_does_not_go_with_shards_is_refused(given: str, wording: Wording) -> None:
    options = parse_options(["--strategy=fsdp", given], {})
    with pytest.raises(TrainError) as refused:
        check_strategy(options, RankInfo(rank=0, size=4))
    assert refused.value.code == 78
    wording(refused.value)


@pytest.mark.e2e
def test_the_strategies_agree_and_read_each_others_checkpoints(start: Start, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    options = (*OPTIONS, "--accumulate=2", "--batch-size=5")  # rank 0 has two parts of it, the others one
    ended = start("train", ".", str(STEPS), *options, "--recompute", size=4, node_size=2, command=SCRIPT).end()
    assert [one.code for one in ended] == [0] * 4, ended[0].err
    found = json.loads(ended[0].out)
    for strategy, shards in (("ddp", 1), ("fsdp", 4), ("hybrid", 2)):
        one = found[strategy]
        assert one["losses"] == pytest.approx(found["ddp"]["losses"], rel=1e-5)
        assert one["bits"] == pytest.approx(found["ddp"]["bits"], rel=1e-5)
        assert set(one["read by"].values()) == {one["digest"]}
        size = TrainingSize(num_parameters=42368, optimizer="adamw", dtype="fp32", shards_all=shards)
        expected = {what: size for what, size, _ in size.rows()}
        for measured in one["bytes"]:
            assert all(size == pytest.approx(expected[what], rel=0.1) for what, size in measured.items())
    for size in (1, 2):
        ended = start("read", ".", str(STEPS), *options, size=size, command=SCRIPT).end()
        assert set(json.loads(ended[0].out).values()) == {found["fsdp"]["digest"]}


@pytest.mark.e2e
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
    assert [one.code for one in other] == [78] * 2

    def command(*words: str) -> subprocess.CompletedProcess[bytes]:
        done = forks.run(["-m", "ddptrain", *words], env=os.environ, cwd=tmp_path, timeout=120)
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
