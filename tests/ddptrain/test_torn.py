"""A checkpoint that was damaged, or cut short by a kill: it is found, and the one before it is loaded."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddptrain.checkpoint import Checkpoint, load, manifest_of, write
from ddptrain.errors import TrainError
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


@pytest.mark.parametrize("change", [{"bytes": "7"}, {"bytes": None}, {"step": True}, {"accuracy": "high"}])
def test_a_manifest_of_other_types_is_set_aside(tmp_path: Path, change: dict[str, object]) -> None:
    shelf = Shelf(tmp_path)
    for step in (4, 8):
        write(shelf.path(step), checkpoint(step))
    manifest = manifest_of(shelf.path(8))
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change, indent=1) + "\n")
    assert found(shelf) == (
        shelf.path(4),
        [f"{shelf.path(8)} is set aside as step-00000008.pt.bad: its manifest step-00000008.json is torn"],
    )


def test_a_name_that_is_not_its_step_s_is_set_aside(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    write(shelf.path(4), checkpoint(4))
    write(shelf.path(99), checkpoint(8))
    reason = "its name is not that of step 8, which is in it"
    assert found(shelf) == (shelf.path(4), [f"{shelf.path(99)} is set aside as step-00000099.pt.bad: {reason}"])


def test_an_older_one_is_no_beginning_of_a_branch_among_newer_ones(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (4, 8):
        write(shelf.path(step), checkpoint(step))
    with pytest.raises(TrainError) as refused:
        found(shelf, resume=str(shelf.path(4)))
    assert (refused.value.code, refused.value.message) == (
        78,
        f"--resume {shelf.path(4)} is of step 4, and {tmp_path} holds step-00000008.pt: "
        "give another --checkpoint-dir for the new branch",
    )


def test_ranks_that_are_started_again_go_on_from_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path)
    for step in (4, 8):
        write(shelf.path(step), checkpoint(step))
    monkeypatch.setenv("DDP_ATTEMPT", "2")
    assert found(shelf, resume=str(shelf.path(4))) == (shelf.path(8), [])
    assert found(shelf, resume="never") == (shelf.path(8), [])


def test_the_one_just_written_is_never_thinned_out(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for step in (4, 8, 12):
        write(shelf.path(step), checkpoint(step))
    shelf.thin_out(keep=1, keep_best=False, written=shelf.path(4))
    assert shelf.checkpoints() == [shelf.path(12), shelf.path(4)]


def found(shelf: Shelf, *, resume: str = "auto") -> tuple[Path, list[str]]:
    """What a training goes on from, and what it is warned of."""
    warned: list[str] = []
    finder = Finder(shelf=shelf, options=CheckpointOptions(resume=resume), metrics=Metrics(), warn=warned.append)
    path, _ = finder.find({"seed": 0}) or pytest.fail("nothing was loaded")
    return path, warned


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
