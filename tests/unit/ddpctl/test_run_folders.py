"""Runs that no ddpctl launched, found by what is in their folders."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ddpctl.errors import NoInputError
from ddpctl.operations import run_folders
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpwire.events import Event
from ddpwire.run_files import NodeState, RankProcess

LOST = RunStatus(run="a", state="lost", message="", code=137)


def node(folder: Path, number: int = 0, *, ranks: int = 2, started: float = 50.0, host: str = "n0") -> Path:
    """A node's folder, as ddprun leaves it."""
    path = folder / f"node-{number}"
    path.mkdir(parents=True)
    processes = tuple(RankProcess(rank=rank, local_rank=rank, pid=9, log="/l") for rank in range(ranks))
    NodeState(run="a", node=number, pid=9, state="training", started=started, ranks=processes).write(path)
    (path / "environment.json").write_text(json.dumps({"host": host}))
    (path / "events.jsonl").write_text(Event(event="node_started", time=started - 10, node=number).line())
    return path


def runs_in(folder: Path) -> dict[str, Run]:
    return {run.name: run for run in run_folders.load_all(folder)}


def test_a_folder_of_ddprun_is_a_run_and_so_is_each_in_a_folder_of_them(tmp_path: Path) -> None:
    for number in (0, 1):
        node(tmp_path / "a", number)
    node(tmp_path / "b", started=90.0)
    (tmp_path / "nothing").mkdir()
    (tmp_path / "a" / "node-99999999").mkdir()
    (tmp_path / "b" / "node-0" / "environment.json").write_text("[" * 99999)
    (tmp_path / "file").touch()
    runs = runs_in(tmp_path)
    assert list(runs) == ["b", "a"], "newest first"
    (alone,) = run_folders.load_all(tmp_path / "a")
    assert alone == runs["a"] == run_folders.load(tmp_path / "a")
    assert (alone.kind, alone.created, alone.folder) == ("local", 40.0, str(tmp_path / "a"))
    assert (alone.job.nodes, alone.job.world_size, alone.checkpoint_dir) == ("2", 4, str(tmp_path / "a/checkpoints"))
    assert run_folders.is_by_hand(alone)


def test_a_folder_that_has_no_run_is_named(tmp_path: Path) -> None:
    for call in (run_folders.load, run_folders.load_all):
        with pytest.raises(NoInputError, match=str(tmp_path / "nowhere")):
            call(tmp_path / "nowhere")
    assert runs_in(tmp_path) == {}


def test_a_node_of_another_machine_is_not_lost_but_unknown(tmp_path: Path) -> None:
    node(tmp_path / "far", host="box7")
    node(tmp_path / "near", host=socket.gethostname())
    runs = runs_in(tmp_path)
    assert run_folders.without_guess(runs["near"], LOST) == LOST
    assert run_folders.without_guess(replace(runs["far"], handle={}), LOST) == LOST, "a launcher knew better"
    far = run_folders.without_guess(runs["far"], LOST)
    assert (far.state, far.code) == ("unknown", None)
    assert "box7" in far.message
