"""Every flipped bit, and manifests that another program may have written."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain.test_checkpoint import checkpoint, files, newest_of

from ddptrain.checkpoint import (
    CorruptCheckpoint,
    OtherFormat,
    load_checkpoint,
    manifest_path,
    partial_path,
    write_checkpoint,
)
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.errors import TrainError


def test_every_flipped_bit_of_a_manifest_and_of_the_beginning_of_the_data_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "step-00000008.pt"
    write_checkpoint(path, replace(checkpoint(8), accuracy=0.9))
    num_flipped = 0
    for file, num_bytes in ((manifest_path(path), None), (path, 200)):
        whole = file.read_bytes()
        for bit in range(8 * len(whole[:num_bytes])):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            with pytest.raises(CorruptCheckpoint):
                load_checkpoint(path)
            num_flipped += 1
        file.write_bytes(whole)
    assert num_flipped == 8 * (manifest_path(path).stat().st_size + 200)
    assert load_checkpoint(path).accuracy == 0.9


def test_a_newer_format_with_other_fields_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-00000008.pt"
    write_checkpoint(path, checkpoint(8))
    manifest_path(path).write_text('{"format": 4, "shards": ["a", "b"]}')
    with pytest.raises(OtherFormat):
        load_checkpoint(path)
    path.rename(partial_path(path))  # a write of that version that a kill has interrupted
    before = files(tmp_path)
    assert CheckpointDirectory(tmp_path).checkpoints() == [path]
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [{"bytes": "7"}, {"bytes": None}, {"step": True}, {"accuracy": "high"}],
    ids=["text", "null", "boolean", "word"],
)
def test_a_manifest_of_other_types_is_set_aside(tmp_path: Path, change: dict[str, object]) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
    manifest = manifest_path(directory.path(8))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change, indent=1) + "\n")
    path, (warning,) = newest_of(directory)
    assert path == directory.path(4)
    assert (tmp_path / "step-00000008.pt.bad").exists()
    assert_names(warning, "step-00000008.pt.bad", "step-00000008.json")


def test_a_name_that_is_not_its_step_s_is_set_aside(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    write_checkpoint(directory.path(4), checkpoint(4))
    write_checkpoint(directory.path(99), checkpoint(8))
    path, (warning,) = newest_of(directory)
    assert path == directory.path(4)
    assert (tmp_path / "step-00000099.pt.bad").exists()
    assert_names(warning, "step-00000099.pt.bad", "8")


def test_a_folder_that_cannot_be_listed_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)

    def fails(_: CheckpointDirectory) -> list[Path]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(CheckpointDirectory, "checkpoints", fails)
    monkeypatch.setattr("ddptrain.checkpoint_directory.READ_PAUSE_S", 0.0)
    with pytest.raises(TrainError) as refused:
        newest_of(directory)
    assert refused.value.code == 66
    assert_names(str(refused.value).replace(str(tmp_path), "FOLDER"), "--checkpoint-dir")


def test_the_one_just_written_is_never_thinned_out(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8, 12):
        write_checkpoint(directory.path(step), checkpoint(step))
    directory.delete_old(keep=1, keep_best=False, written=directory.path(4))
    assert directory.checkpoints() == [directory.path(12), directory.path(4)]


def test_a_fifo_is_passed_over_and_a_link_is_not_written_through(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
    directory.path(8).unlink()
    os.mkfifo(directory.path(8))
    path, (warning,) = newest_of(directory)
    assert path == directory.path(4)
    assert_names(warning, "step-00000008.pt")
    mine = tmp_path / "mine"
    mine.write_text("not a checkpoint")
    partial_path(directory.path(12)).symlink_to(mine)
    write_checkpoint(directory.path(12), checkpoint(12))
    assert mine.read_text() == "not a checkpoint"
    assert load_checkpoint(directory.path(12)).step == 12
