"""What is written is proved when it is read, and a write may be cut short anywhere."""

import fcntl
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ddptrain.checkpoint import Checkpoint, load, manifest_of, write
from ddptrain.errors import TrainError
from ddptrain.metrics import Metrics
from ddptrain.options.checkpoints import CheckpointOptions
from ddptrain.resume import Finder
from ddptrain.saver import Saver
from ddptrain.shelf import Shelf
from ddptrain.snapshot import Snapshot


def checkpoint(step: int, accuracy: float | None = None) -> Checkpoint:
    parts = {"model": {"weight": torch.full((500,), float(step))}, "optimizer": {"state": {0: {"step": step}}}}
    return Checkpoint(step=step, shaping={"seed": 0}, parts=parts, accuracy=accuracy)


def saver(shelf: Shelf, warned: list[str], **options: object) -> Saver:
    return Saver(shelf, CheckpointOptions(**options), Metrics(), warn=warned.append)


def save(one: Saver, step: int, accuracy: float | None = None) -> None:
    written = checkpoint(step, accuracy)
    one.save(step, written.parts, written.shaping, accuracy)
    assert one.settle(step)


def test_what_is_read_is_what_was_written_and_sha256sum_can_prove_it(tmp_path: Path) -> None:
    path = tmp_path / "step-00000007.pt"
    write(path, checkpoint(7, 0.5))
    again = load(path)
    assert (again.step, again.shaping, again.accuracy) == (7, {"seed": 0}, 0.5)
    assert torch.equal(again.parts["model"]["weight"], torch.full((500,), 7.0))
    assert again.parts["optimizer"] == {"state": {0: {"step": 7}}}
    manifest = json.loads(manifest_of(path).read_text())
    assert manifest["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    plain = torch.load(path, weights_only=True)  # torch alone reads it too
    assert plain["parts"]["model"]["weight"][0] == 7


def corrupt(path: Path, kind: str, chance: random.Random) -> None:
    if kind == "missing":
        chance.choice((path, manifest_of(path))).unlink()
        return
    victim = manifest_of(path) if chance.random() < 0.2 else path
    data = bytearray(victim.read_bytes())
    if kind == "truncated":
        data = data[: chance.randrange(len(data))]
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    victim.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing"])
def test_100_of_100_corrupted_ones_are_found_and_the_one_before_loads(tmp_path: Path, kind: str) -> None:
    chance = random.Random(kind)
    shelf = Shelf(tmp_path)
    for step in (4, 8):
        write(shelf.path(step), checkpoint(step))
    whole = {path: path.read_bytes() for path in tmp_path.glob("step-*")}
    found = 0
    for _ in range(100):
        corrupt(shelf.path(8), kind, chance)
        warned: list[str] = []
        finder = Finder(shelf=shelf, options=CheckpointOptions(), metrics=Metrics(), warn=warned.append)
        path, loaded = finder.find({"seed": 0}) or pytest.fail("nothing was loaded")
        assert torch.equal(loaded.parts["model"]["weight"], torch.full((500,), 4.0))
        assert path == shelf.path(4)
        found += len(warned) == 1 and warned[0].startswith(f"{shelf.path(8)} is set aside as step-00000008.pt.bad: ")
        for bad in tmp_path.glob("*.bad"):
            bad.unlink()
        for file, data in whole.items():
            file.write_bytes(data)
    assert found == 100


KILLED = """
import itertools, os, signal, sys
from pathlib import Path
import torch
from ddptrain import checkpoint
from ddptrain.checkpoint import Checkpoint, Corrupt, load, write
from ddptrain.shelf import Shelf

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
    checkpoint._Hashed.write = counted(checkpoint._Hashed.write)
    write(Shelf(folder).path(8), state(8))
    with (folder / "operations").open("w") as file:
        file.write(str(next(done)))
    os._exit(0)

write(Shelf(folder).path(4), state(4))
assert attempt(-1) == 0
operations = int((folder / "operations").read_text())
last = operations - 8  # those that give the files their names
picked = sorted({round(i * (last - 1) / (points - 9)) for i in range(points - 8)} | set(range(last, operations)))
good = 0
for at in picked:
    for file in folder.glob("*step-00000008*"):
        file.unlink()
    assert attempt(at) == signal.SIGKILL
    paths = Shelf(folder).checkpoints()
    loaded = load(paths[0])
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
    write(path, checkpoint(8))
    path.rename(tmp_path / ".step-00000008.pt.part")
    assert Shelf(tmp_path).checkpoints() == [path]
    assert load(path).step == 8


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    shelf, warned = Shelf(tmp_path), []
    one = saver(shelf, warned, keep=2)
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.9), (4, 0.8), (5, None), (6, 0.7)):
        save(one, step, accuracy)
    assert [path.name for path in shelf.checkpoints()] == ["step-00000006.pt", "step-00000005.pt", "step-00000003.pt"]
    assert warned == []


def test_all_are_kept_when_asked_and_the_best_is_not(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "all")
    for step in range(1, 6):
        save(saver(shelf, [], keep=0), step)
    assert len(shelf.checkpoints()) == 5
    shelf = Shelf(tmp_path / "newest")
    for step in range(1, 6):
        save(saver(shelf, [], keep=1, keep_best=False), step, 1 / step)
    assert shelf.checkpoints() == [shelf.path(5)]


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
    one = saver(Shelf(tmp_path), [], minutes=10.0)
    assert not one.due(3)
    later = time.monotonic() + 601
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert one.due(3)
    every = saver(Shelf(tmp_path), [], every=3)
    assert [step for step in range(1, 8) if every.due(step)] == [3, 6]


def test_a_disk_that_hangs_is_given_up_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr("ddptrain.saver.STUCK_S", 0.3)
    monkeypatch.setattr("ddptrain.checkpoint.os.fsync", lambda _: os.read(reader, 1))
    warned: list[str] = []
    beats: list[int] = []
    shelf = Shelf(tmp_path)
    one = Saver(shelf, CheckpointOptions(), Metrics(), warn=warned.append, alive=beats.append)
    one.save(1, {}, {}, None)
    one.save(2, {}, {}, None)
    assert warned == ["no checkpoint of step 2: the disk has not taken the one before it for 0.3 s"]
    assert set(beats) == {2}
    os.write(writer, b"go on!")
    assert one.settle(2)
    assert shelf.checkpoints() == [shelf.path(1)]


HOLD = "import sys; from pathlib import Path; from ddptrain.shelf import Shelf; "
HOLD += "kept = Shelf(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_two_trainings_cannot_share_a_folder_and_a_lock_dies_with_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddptrain.shelf.LOCK_WAIT_S", 0.2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(TrainError) as refused:
            Shelf(tmp_path)
        told = refused.value.message
        assert (refused.value.code, told.replace(os.uname().nodename, "HOST")) == (
            73,
            f"--checkpoint-dir {tmp_path} is in use by process {holder.pid} on HOST: "
            "stop that training, or give another one",
        )
    finally:
        holder.kill()
        holder.communicate()
    assert Shelf(tmp_path).checkpoints() == []


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", unknown)
    assert Shelf(tmp_path).checkpoints() == []
