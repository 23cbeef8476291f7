"""A checkpoint that was damaged, or cut short by a kill: it is found, and the one before it is loaded."""

import errno
import os
import random
import subprocess
import sys
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
from ddptrain.checkpoint_manager import CheckpointFinder
from ddptrain.config import CheckpointOptions
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics


def checkpoint(step: int) -> Checkpoint:
    parts = {"model": {"weight": torch.full((500,), float(step))}, "optimizer": {"state": {0: {"step": step}}}}
    return Checkpoint(step=step, shaping={"seed": 0}, parts=parts, accuracy=None)


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
def test_100_of_100_corrupted_ones_are_found_and_the_one_before_loads(tmp_path: Path, kind: str) -> None:
    chance = random.Random(kind)
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
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
            assert found(directory)[0] == directory.path(4)
            assert torch.load(tmp_path / "step-00000008.pt.bad", weights_only=True)["step"] == 8
            return
    before = files(tmp_path)
    with pytest.raises(TrainError) as refused:
        found(directory, resume=resume if resume == "auto" else str(tmp_path / resume))
    assert (refused.value.code, refused.value.fields) == (78, {"path": str(directory.path(8)), "format": number})
    assert_names(refused.value, "step-00000008.pt", "2", "3")
    assert files(tmp_path) == before


@pytest.mark.parametrize(("times", "step"), [(2, 8), (1000, 4)], ids=["passes", "stays"])
def test_one_that_cannot_be_read_is_read_again_and_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, step: int
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number in (4, 8):
        write_checkpoint(directory.path(number), checkpoint(number))
    failed = []

    def open_or_fail(path: Path) -> BinaryIO:
        if path == directory.path(8) and len(failed) < times:
            failed.append(path)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return path.open("rb")

    monkeypatch.setattr(checkpoint_format, "open_regular", open_or_fail)
    monkeypatch.setattr("ddptrain.checkpoint_directory.READ_PAUSE_S", 0.0)
    path, warnings = found(directory)
    assert path == directory.path(step)
    assert sorted(file.name for file in tmp_path.glob("step-*.pt*")) == ["step-00000004.pt", "step-00000008.pt"]
    assert len(warnings) == (step == 4)
    for warning in warnings:
        assert_names(warning, "step-00000008.pt")


def test_too_little_memory_sets_nothing_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)
    for number in (4, 8):
        write_checkpoint(directory.path(number), checkpoint(number))
    load, calls = torch.load, []

    def load_or_fail(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", load_or_fail)
    path, (warning,) = found(directory)
    assert path == directory.path(4)
    assert os.strerror(errno.ENOMEM) in warning
    assert directory.path(8).exists()


def test_an_older_one_among_newer_ones_is_refused(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
    with refused(TrainError, "--resume", "step-00000004.pt", "step-00000008.pt", "--checkpoint-dir", code=78):
        found(directory, resume=str(directory.path(4)))


def test_ranks_that_are_started_again_go_on_from_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (4, 8):
        write_checkpoint(directory.path(step), checkpoint(step))
    monkeypatch.setenv("DDP_ATTEMPT", "2")
    assert found(directory, resume=str(directory.path(4))) == (directory.path(8), [])
    assert found(directory, resume="never") == (directory.path(8), [])


def found(directory: CheckpointDirectory, *, resume: str = "auto") -> tuple[Path, list[str]]:
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
