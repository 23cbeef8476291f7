"""What is written is proved when it is read; a write may be cut short anywhere, and a damaged checkpoint is found."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from tests.messages import assert_names, refused

from ddptrain import checkpoint as checkpoint_format
from ddptrain.checkpoint import (
    Checkpoint,
    load_checkpoint,
    manifest_path,
    write_checkpoint,
)
from ddptrain.checkpoint_directory import CheckpointDirectory
from ddptrain.checkpoint_manager import CheckpointFinder, CheckpointSaver, Snapshot
from ddptrain.config import CheckpointOptions
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddpwire.events import EventLog, read_events
from ddpwire.metrics import CHECKPOINT_FAILURES, CHECKPOINT_FALLBACKS


def checkpoint(step: int, accuracy: float | None = None) -> Checkpoint:
    parts = {"model": {"weight": torch.full((500,), float(step))}, "optimizer": {"state": {0: {"step": step}}}}
    return Checkpoint(step=step, shaping={"seed": 0}, parts=parts, accuracy=accuracy)


SILENT = EventLog(None, node=0)


def saver(directory: CheckpointDirectory, warned: list[str], **options: object) -> CheckpointSaver:
    return CheckpointSaver(directory, CheckpointOptions(**options), Metrics(), events=SILENT, warn=warned.append)


def save(checkpoints: CheckpointSaver, step: int, accuracy: float | None = None) -> None:
    written = checkpoint(step, accuracy)
    checkpoints.save(step, written.parts, written.shaping, accuracy)
    assert checkpoints.wait_for_write(step)


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


@pytest.mark.parametrize(
    ("options", "kept"),
    [({"keep": 2}, [6, 5, 3]), ({"keep": 0}, [6, 5, 4, 3, 2, 1]), ({"keep": 1, "keep_best": False}, [6])],
    ids=["newest and best", "all", "newest"],
)
def test_the_newest_and_the_best_are_kept(tmp_path: Path, options: dict[str, Any], kept: list[int]) -> None:
    directory, warned = CheckpointDirectory(tmp_path), []
    checkpoints = saver(directory, warned, **options)
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.8), (5, None), (6, 0.7)):
        save(checkpoints, step, accuracy)
    assert directory.checkpoints() == [directory.path(step) for step in kept]
    assert warned == []


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
    checkpoints = saver(directory, [], minutes=10.0)
    assert not checkpoints.is_due(3)
    later = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert checkpoints.is_due(3)
    every = saver(directory, [], every=3)
    assert [step for step in range(1, 8) if every.is_due(step)] == [3, 6]


def test_a_disk_that_hangs_is_given_up_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("ddptrain.checkpoint_manager.STUCK_S", 0.3)
    monkeypatch.setattr("ddptrain.checkpoint.os.fsync", lambda _: os.read(reader, 1))
    warned: list[str] = []
    beats: list[int] = []
    directory = CheckpointDirectory(tmp_path)
    checkpoints = CheckpointSaver(
        directory, CheckpointOptions(), Metrics(), events=SILENT, warn=warned.append, on_wait=beats.append
    )
    checkpoints.save(1, {}, {}, None)
    checkpoints.save(2, {}, {}, None)
    (warning,) = warned
    assert_names(warning, "2", "0.3")
    monkeypatch.setattr("ddptrain.checkpoint_manager.STUCK_S", 1.0)
    assert not checkpoints.wait_for_write()
    assert set(beats) == {2}, "there are no heartbeats after the last step"
    os.write(writer, b"continue!")
    deadline = time.monotonic() + 10
    while not checkpoints.wait_for_write(2):
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


def test_the_best_one_is_kept_while_its_manifest_cannot_be_read(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as unreadable:
        unreadable.setattr(checkpoint_format, "read_regular", fail)
        assert directory.delete_old(keep=1, keep_best=True, written=directory.path(8)) == 2
    assert directory.delete_old(keep=1, keep_best=False, written=directory.path(8)) == 1


def test_a_forked_child_does_not_keep_the_folder_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddptrain.checkpoint_directory.LOCK_WAIT_S", 0.0)
    directory, (parent, inherited) = CheckpointDirectory(tmp_path), socket.socketpair()
    with parent, inherited:
        if not (child := os.fork()):
            parent.close()
            inherited.send(b"1")  # os.fork has closed the child's copy of the lock
            inherited.recv(1)  # until the parent closes its end
            os._exit(0)
        parent.recv(1)
        directory.unlock()
        assert CheckpointDirectory(tmp_path).checkpoints() == []
    os.waitpid(child, 0)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """A folder with the checkpoints of steps 4 and 8."""
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
    return directory


def corrupt(path: Path, kind: str, chance: random.Random) -> None:
    if kind == "missing":
        chance.choice((path, manifest_path(path))).unlink()
        return
    victim = manifest_path(path) if chance.random() < 0.2 else path
    data = bytearray(victim.read_bytes())
    if kind == "truncated":
        data = data[: chance.randrange(len(data))]
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    victim.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
def test_100_of_100_corrupted_ones_are_found_and_the_one_before_loads(
    directory: CheckpointDirectory, tmp_path: Path, kind: str
) -> None:
    chance = random.Random(kind)
    whole = {path: path.read_bytes() for path in tmp_path.glob("step-*")}
    warnings = []
    for _ in range(100):
        corrupt(directory.path(8), kind, chance)
        warned: list[str] = []
        finder = CheckpointFinder(
            directory=directory, options=CheckpointOptions(), metrics=Metrics(), warn=warned.append
        )
        path, loaded = finder.find({"seed": 0}) or pytest.fail("nothing was loaded")
        assert torch.equal(loaded.parts["model"]["weight"], torch.full((500,), 4.0))
        assert path == directory.path(4)
        warnings += warned
        for bad in tmp_path.glob("*.bad"):
            bad.unlink()
        for file, data in whole.items():
            file.write_bytes(data)
    assert len(warnings) == 100
    (begin,) = {warning.partition(": ")[0] for warning in warnings}
    assert_names(begin, "step-00000008.pt.bad")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*step-*")}


@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.parametrize("resume", ["auto", "step-00000008.pt"])
def test_another_format_is_refused_and_nothing_is_touched(
    tmp_path: Path, number: int, resume: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    write_checkpoint(directory.path(4), checkpoint(4))
    with monkeypatch.context() as other_version:
        other_version.setattr(checkpoint_format, "FORMAT", number)
        write_checkpoint(directory.path(8), checkpoint(8))
    if number == 1:
        manifest_path(directory.path(8)).unlink()  # format 1 had none
        if resume == "auto":
            assert newest_of(directory)[0] == directory.path(4)
            assert torch.load(tmp_path / "step-00000008.pt.bad", weights_only=True)["step"] == 8
            return
    before = files(tmp_path)
    with pytest.raises(TrainError) as raised:
        newest_of(directory, resume=resume if resume == "auto" else str(tmp_path / resume))
    assert raised.value.code == 78
    assert_names(raised.value, directory.path(8), f"format {number}", "2", "3")
    assert files(tmp_path) == before


@pytest.mark.parametrize(("times", "step"), [(2, 8), (1000, 4)], ids=["passes", "stays"])
def test_one_that_cannot_be_read_is_read_again_and_keeps_its_name(
    directory: CheckpointDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, step: int
) -> None:
    failed: list[Path] = []

    def open_or_fail(path: Path) -> BinaryIO:
        if path == directory.path(8) and len(failed) < times:
            failed.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return path.open("rb")

    monkeypatch.setattr(checkpoint_format, "open_regular", open_or_fail)
    monkeypatch.setattr("ddptrain.checkpoint_directory.READ_PAUSE_S", 0.0)
    counted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Metrics, "count", lambda _, *metric: counted.append(metric))
    path, warnings = newest_of(directory)
    assert path == directory.path(step)
    failed_load = [(CHECKPOINT_FAILURES, "load", "io"), (CHECKPOINT_FALLBACKS,)]
    assert counted == (failed_load if step == 4 else [])
    assert sorted(file.name for file in tmp_path.glob("step-*.pt*")) == ["step-00000004.pt", "step-00000008.pt"]
    assert len(warnings) == (step == 4)
    for warning in warnings:
        assert_names(warning, "step-00000008.pt")


def test_too_little_memory_sets_nothing_aside(directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    load, calls = torch.load, []

    def load_or_fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", load_or_fail)
    path, (warning,) = newest_of(directory)
    assert path == directory.path(4)
    assert os.strerror(errno.ENOMEM) in warning
    assert directory.path(8).exists()


def test_an_older_one_among_newer_ones_is_refused(directory: CheckpointDirectory) -> None:
    with refused(TrainError, "--resume", "step-00000004.pt", "step-00000008.pt", "--checkpoint-dir", code=78):
        newest_of(directory, resume=str(directory.path(4)))


def test_ranks_that_are_started_again_go_on_from_the_newest(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_ATTEMPT", "2")
    assert newest_of(directory, resume=str(directory.path(4))) == (directory.path(8), [])
    assert newest_of(directory, resume="never") == (directory.path(8), [])


@pytest.mark.parametrize(("before", "now", "is_same"), [("none", "plain", True), ("bf16", "plain", False)])
def test_the_old_name_of_the_communication_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, now: str, is_same: bool
) -> None:
    directory, counted = CheckpointDirectory(tmp_path), list[tuple[Any, ...]]()
    written = Checkpoint(step=4, shaping={"compress": before}, parts={}, accuracy=None)
    write_checkpoint(directory.path(4), written)
    monkeypatch.setattr(Metrics, "count", lambda _, *metric: counted.append(metric))
    finder = CheckpointFinder(directory=directory, options=CheckpointOptions(), metrics=Metrics(), warn=pytest.fail)
    with contextlib.nullcontext() if is_same else refused(TrainError, "communication", before, now, code=78):
        finder.find({"communication": now})
    assert counted == ([] if is_same else [(CHECKPOINT_FAILURES, "load", "incompatible")])


def newest_of(directory: CheckpointDirectory, *, resume: str = "auto") -> tuple[Path, list[str]]:
    """What a training continues from, and what it is warned of."""
    warned: list[str] = []
    finder = CheckpointFinder(
        directory=directory, options=CheckpointOptions(resume=resume), metrics=Metrics(), warn=warned.append
    )
    path, _ = finder.find({"seed": 0}) or pytest.fail("nothing was loaded")
    return path, warned


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from typing import Any, BinaryIO
import torch
from ddptrain import checkpoint
from ddptrain.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ddptrain.checkpoint_directory import CheckpointDirectory

torch.set_num_threads(1)
folder, points = Path(sys.argv[1]), int(sys.argv[2])

def state(step):
    parts = {"model": {str(i): torch.full((1000,), float(step)) for i in range(20)}}
    return Checkpoint(step=step, shaping={}, parts=parts, accuracy=None)

def attempt(at):
    '''Save step 8 in a child that kills itself before its operation number ``at``; how it ended.'''
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    done = itertools.count()
    def counted(function):
        def call(*args, **kwargs):
            if next(done) == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)
    checkpoint._HashingFile.write = counted(checkpoint._HashingFile.write)
    write_checkpoint(CheckpointDirectory(folder).path(8), state(8))
    with (folder / "operations").open("w") as file:
        file.write(str(next(done)))
    os._exit(0)

write_checkpoint(CheckpointDirectory(folder).path(4), state(4))
assert attempt(-1) == 0
operations = int((folder / "operations").read_text())
last = operations - 8  # those that give the files their names
picked = sorted({round(i * (last - 1) / (points - 9)) for i in range(points - 8)} | set(range(last, operations)))
good = 0
for at in picked:
    for file in folder.glob("*step-00000008*"):
        file.unlink()
    assert attempt(at) == signal.SIGKILL
    paths = CheckpointDirectory(folder).checkpoints()
    loaded = load_checkpoint(paths[0])
    good += all(torch.equal(one, torch.full((1000,), float(loaded.step))) for one in loaded.parts["model"].values())
    left = [path.name for path in folder.glob(".step*")]
    assert not left, left
print(len(picked), good)
"""


def test_killed_while_saving_at_20_points_a_good_one_loads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "20"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    points, good = map(int, done.stdout.split())
    assert points >= 20
    assert good == points


def test_a_kill_between_the_two_names_is_made_good(tmp_path: Path) -> None:
    path = tmp_path / "step-00000008.pt"
    write_checkpoint(path, checkpoint(8))
    path.rename(tmp_path / ".step-00000008.pt.part")
    assert CheckpointDirectory(tmp_path).checkpoints() == [path]
    assert load_checkpoint(path).step == 8
