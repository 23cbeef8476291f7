"""A checkpoint that was damaged, or cut short by a kill: it is found, and the one before it is loaded."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddptrain.checkpoint import Checkpoint, load, manifest_of, write
from ddptrain.metrics import Metrics
from ddptrain.options.checkpoints import CheckpointOptions
from ddptrain.resume import Finder
from ddptrain.shelf import Shelf


def checkpoint(step: int) -> Checkpoint:
    parts = {"model": {"weight": torch.full((500,), float(step))}, "optimizer": {"state": {0: {"step": step}}}}
    return Checkpoint(step=step, shaping={"seed": 0}, parts=parts, accuracy=None)


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
