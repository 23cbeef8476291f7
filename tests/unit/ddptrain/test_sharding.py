"""Sharded trainings and their checkpoints: equal to DDP's, read by every strategy and world size, whole or noticed."""

import errno
import os
import pickle
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ddptrain import checkpoint as checkpoint_format
from ddptrain import sharding
from ddptrain.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    Shard,
    data_files,
    load_checkpoint,
    manifest_path,
    whole,
    write_checkpoint,
)
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.data.augment import Batch
from ddptrain.data.sampling import BatchShard
from ddptrain.distributed import RankInfo, World
from ddptrain.export import choose_checkpoint
from ddptrain.train_loop import weighted_parts

NUM_SHARDS = 4


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
    checkpoint = whole(load_checkpoint(path).parts["model"])
    assert torch.equal(checkpoint["weight"], torch.arange(10.0).view(10, 1) + 8)
    assert int(checkpoint["count"]) == 8
    assert {choose_checkpoint(file, best=False)[0] for file in (*data_files(path), manifest_path(path))} == {path}


def test_a_rank_can_tell_rank_0_that_a_shard_is_corrupt() -> None:
    sent = pickle.loads(pickle.dumps(CorruptCheckpoint("truncated", "shard 1 is truncated")))  # noqa: S301
    assert (type(sent), sent.reason, str(sent)) == (CorruptCheckpoint, "truncated", "shard 1 is truncated")


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


def test_old_and_corrupt_ones_go_with_all_their_shards(tmp_path: Path) -> None:
    paths = [write_shards(tmp_path, step) for step in (4, 8, 12)]
    (tmp_path / ".shared-0").touch()  # of a training that was killed as it started
    directory = CheckpointDirectory(tmp_path)
    assert not list(tmp_path.glob(".shared-*"))
    assert directory.delete_old(keep=2, keep_best=False, written=paths[2]) == 2
    directory.set_aside(paths[1])
    remaining = sorted(file.name for file in tmp_path.glob("step-*"))
    shards = [f"shard-{number}" for number in range(1, NUM_SHARDS)]
    assert remaining == sorted(
        [f"step-00000012.{end}" for end in ("json", "pt", *shards)]
        + [f"step-00000008.{end}.bad" for end in ("json", "pt", *shards)]
    )
    assert directory.num_bad() == 1


def test_sharded_ranks_take_the_same_number_of_parts() -> None:
    batch = Batch(inputs=torch.ones(1, 3), labels_B=torch.zeros(1))
    shard = BatchShard(indices_N=torch.arange(1), weight=0.5, most=2)
    parts = {sharded: weighted_parts(batch, shard, 2, is_sharded=sharded) for sharded in (True, False)}
    assert {sharded: [weight for _, weight in of] for sharded, of in parts.items()} == {True: [0.5, 0.0], False: [0.5]}
    assert parts[True][1][0] is parts[True][0][0]


def test_the_weights_of_batch_normalization_keep_their_dtype_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = {}
    monkeypatch.setattr(
        sharding, "fully_shard", lambda module, mp_policy, **_: dtypes.update({type(module): mp_policy.param_dtype})
    )
    world = World(rank_info=RankInfo(), device=torch.device("cpu"), backend="gloo", data_group=None)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    own = sharding.Sharding(world=world, mesh=cast(Any, None), shard=None)
    own.apply(model, None, torch.bfloat16)
    assert dtypes == {nn.BatchNorm2d: None, nn.Sequential: torch.bfloat16}
