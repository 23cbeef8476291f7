"""What is written is proved when it is read, and a write may be cut short anywhere."""

import errno
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names, refused

from ddptrain.checkpoint import Checkpoint, load_checkpoint, manifest_path, write_checkpoint
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.checkpoint_manager import CheckpointSaver, Snapshot
from ddptrain.config import CheckpointOptions
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddpwire.events import EventLog, read_events


def checkpoint(step: int, accuracy: float | None = None) -> Checkpoint:
    parts = {"model": {"weight": torch.full((500,), float(step))}, "optimizer": {"state": {0: {"step": step}}}}
    return Checkpoint(step=step, shaping={"seed": 0}, parts=parts, accuracy=accuracy)


SILENT = EventLog(None, node=0)


def saver(directory: CheckpointDirectory, warned: list[str], **options: object) -> CheckpointSaver:
    return CheckpointSaver(directory, CheckpointOptions(**options), Metrics(), events=SILENT, warn=warned.append)


def save(one: CheckpointSaver, step: int, accuracy: float | None = None) -> None:
    written = checkpoint(step, accuracy)
    one.save(step, written.parts, written.shaping, accuracy)
    assert one.wait_for_write(step)


def test_what_is_read_is_what_was_written_and_sha256sum_can_prove_it(tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.pt"
    write_checkpoint(path, checkpoint(7, 0.5))
    again = load_checkpoint(path)
    assert (again.step, again.shaping, again.accuracy) == (7, {"seed": 0}, 0.5)
    assert torch.equal(again.parts["model"]["weight"], torch.full((500,), 7.0))
    assert again.parts["optimizer"] == {"state": {0: {"step": 7}}}
    manifest = json.loads(manifest_path(path).read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    plain = torch.load(path, weights_only=True)  # torch alone reads it too
    assert plain["parts"]["model"]["weight"][0] == 7


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    directory, warned = CheckpointDirectory(tmp_path), []
    one = saver(directory, warned, keep=2)
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.8), (5, None), (6, 0.7)):
        save(one, step, accuracy)
    assert [path.name for path in directory.checkpoints()] == [
        "step-00000006.pt",
        "step-00000005.pt",
        "step-00000003.pt",
    ]
    assert warned == []


def test_all_are_kept_when_asked_and_the_best_is_not(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path / "all")
    for step in range(1, 6):
        save(saver(directory, [], keep=0), step)
    assert len(directory.checkpoints()) == 5
    directory = CheckpointDirectory(tmp_path / "newest")
    for step in range(1, 6):
        save(saver(directory, [], keep=1, keep_best=False), step, 1 / step)
    assert directory.checkpoints() == [directory.path(5)]


def test_the_copy_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    weight = torch.zeros(1000, 1000).to(memory_format=torch.contiguous_format)
    images = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    snapshot = Snapshot()
    kept = snapshot.take({"a": {"weight": weight, "images": images, "lr": 0.1}, "b": [1, (weight,)]})
    weight.add_(1)
    assert (float(kept["a"]["weight"].sum()), kept["a"]["lr"], kept["b"][0]) == (0.0, 0.1, 1)
    assert kept["a"]["images"].stride() == images.stride()
    again = snapshot.take({"a": {"weight": weight, "images": images, "lr": 0.2}, "b": [2, (weight,)]})
    assert again["a"]["weight"].data_ptr() == kept["a"]["weight"].data_ptr()  # the memory is kept
    assert float(again["b"][1][0].sum()) == 1_000_000


def test_saved_when_the_last_one_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)
    one = saver(directory, [], minutes=10.0)
    assert not one.is_due(3)
    later = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert one.is_due(3)
    every = saver(directory, [], every=3)
    assert [step for step in range(1, 8) if every.is_due(step)] == [3, 6]


def test_a_disk_that_hangs_is_given_up_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("ddptrain.checkpoint_manager.STUCK_S", 0.3)
    monkeypatch.setattr("ddptrain.checkpoint.os.fsync", lambda _: os.read(reader, 1))
    warned: list[str] = []
    beats: list[int] = []
    directory = CheckpointDirectory(tmp_path)
    one = CheckpointSaver(
        directory, CheckpointOptions(), Metrics(), events=SILENT, warn=warned.append, on_wait=beats.append
    )
    one.save(1, {}, {}, None)
    one.save(2, {}, {}, None)
    (warning,) = warned
    assert_names(warning, "2", "0.3")
    monkeypatch.setattr("ddptrain.checkpoint_manager.STUCK_S", 1.0)
    assert not one.wait_for_write()
    assert set(beats) == {2}, "there are no heartbeats after the last step"
    os.write(writer, b"continue!")
    deadline = time.monotonic() + 10
    while not one.wait_for_write(2):
        assert time.monotonic() < deadline
    assert directory.checkpoints() == [directory.path(1)]


HOLD = "import sys; from pathlib import Path; from ddptrain.checkpoint_directory import CheckpointDirectory; "


HOLD += "kept = CheckpointDirectory(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_two_trainings_cannot_share_a_folder_and_a_lock_dies_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddptrain.checkpoint_directory.LOCK_WAIT_S", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with refused(TrainError, "--checkpoint-dir", holder.pid, os.uname().nodename, code=73):
            CheckpointDirectory(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    assert CheckpointDirectory(tmp_path).checkpoints() == []


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


@pytest.fixture
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddptrain.checkpoint_directory.LOCK_WAIT_S", 0.0)


@pytest.mark.usefixtures("no_wait")
def test_a_lock_outlives_another_descriptor_of_its_file(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")
    assert not can_be_taken(tmp_path)
    del directory
    assert can_be_taken(tmp_path)


def no_open_file_locks(*_: object) -> None:
    raise OSError(errno.EINVAL, "Invalid argument")


def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "fcntl", no_open_file_locks)
    monkeypatch.setattr(fcntl, "lockf", unknown)
    assert CheckpointDirectory(tmp_path).checkpoints() == []
    assert_names(capfd.readouterr().err.replace(str(tmp_path), "FOLDER"), ".lock")


def test_an_old_checkpoint_that_cannot_be_deleted_is_no_failure_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, warnings, events = CheckpointDirectory(tmp_path), list[str](), tmp_path / "events.jsonl"
    for step in (1, 2, 3):
        write_checkpoint(directory.path(step), Checkpoint(step=step, shaping={}, parts={}, accuracy=None))
    unlink = Path.unlink

    def refuse_the_second(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("step-00000002"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse_the_second)
    saver = CheckpointSaver(
        directory, CheckpointOptions(keep=1), Metrics(), events=EventLog(events, node=0), warn=warnings.append,
        on_wait=lambda _: None,
    )  # fmt: skip
    saver.save(4, {}, {}, None)
    assert saver.wait_for_write()
    assert [(event.event, event.step) for event in read_events(events.read_text())] == [("checkpoint_saved", 4)]
    assert saver.newest == directory.path(4)
    (warning,) = warnings
    assert "step-00000002" in warning
    assert directory.checkpoints() == [directory.path(4), directory.path(2)]
