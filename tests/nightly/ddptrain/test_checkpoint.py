"""The lock of a checkpoint folder on other kernels and for forked children, and links in the folder."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddptrain import test_checkpoint
from tests.unit.ddptrain.test_checkpoint import checkpoint, no_open_file_locks

from ddptrain.checkpoint import manifest_path, write_checkpoint
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.errors import TrainError


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.checkpoint_directory.LOCK_WAIT_S", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        assert not can_be_taken(tmp_path)
        del directory
        assert can_be_taken(tmp_path)
    finally:
        os.close(writer)
        os.waitpid(child, 0)


@pytest.mark.usefixtures("no_wait")
def test_an_older_kernel_locks_for_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "fcntl", no_open_file_locks)
    directory = CheckpointDirectory(tmp_path)
    assert not can_be_taken(directory.folder)


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lock_that_is_no_file_of_its_own_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / ".lock")
    else:
        (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(TrainError) as refused:
        CheckpointDirectory(tmp_path)
    assert refused.value.code == 73
    assert not (tmp_path / "mine").exists()
    assert_names(str(refused.value).replace(str(tmp_path), "FOLDER"), "--checkpoint-dir")


def test_the_trial_of_a_folder_writes_through_no_link(tmp_path: Path) -> None:
    folder, mine = tmp_path / "checkpoints", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("not a checkpoint")
    (folder / f".probe-{os.getpid()}").symlink_to(mine)
    CheckpointDirectory(folder)
    assert mine.read_text() == "not a checkpoint"


def test_what_may_be_the_best_is_kept_while_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step, accuracy in ((1, 0.9), (2, 0.5), (3, 0.1)):
        write_checkpoint(directory.path(step), checkpoint(step, accuracy))

    def read(path: Path) -> bytes:
        if path == manifest_path(directory.path(1)):
            raise OSError(errno.ESTALE, "Stale file handle")
        return path.read_bytes()

    monkeypatch.setattr("ddptrain.checkpoint.read_regular", read)
    directory.delete_old(keep=1, keep_best=True, written=directory.path(3))
    assert directory.path(1).exists()
    monkeypatch.undo()
    directory.delete_old(keep=1, keep_best=True, written=directory.path(3))
    assert directory.checkpoints() == [directory.path(3), directory.path(1)]


directory = test_checkpoint.directory  # the fixture


@pytest.mark.usefixtures("no_wait")
def test_a_lock_outlives_another_descriptor_of_its_file(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")
    assert not can_be_taken(tmp_path)
    del directory
    assert can_be_taken(tmp_path)


def can_be_taken(folder: Path) -> bool:
    """Whether another process gets the lock; a fork, for it is there at once."""
    child = os.fork()
    if child == 0:
        try:
            CheckpointDirectory(folder)
        except TrainError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0
