"""What a rank records of the files that it resumes from."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddprank import client, resume
from ddprank.resume import EDGE_BYTES, ResumeRecord

Audited = tuple[ResumeRecord, Callable[[], Any]]


@pytest.fixture
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audited:
    """A record, and a function that reads what it has written."""
    record = ResumeRecord(str(tmp_path / "checkpoints"), str(tmp_path / "heartbeat.resume"))
    monkeypatch.setattr(resume, "_record", record)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.pt").write_bytes(os.urandom(3 * EDGE_BYTES))
    return record, lambda: json.loads((tmp_path / "heartbeat.resume").read_text())


def test_only_files_of_the_folder_that_are_read_before_the_first_step_count(audited: Audited, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    (folder / "last.pt").read_bytes()
    (folder / "new.pt").write_bytes(b"1")
    (tmp_path / "data.pt").write_bytes(b"1")
    (tmp_path / "data.pt").read_bytes()
    os.close(os.open(folder, os.O_RDONLY))
    with pytest.raises(FileNotFoundError):
        (folder / "missing.pt").read_bytes()
    client.progress(262)
    (folder / "new.pt").read_bytes()
    record = audited[1]()
    assert {name: size for name, (size, _) in record["files"].items()} == {"last.pt": 3 * EDGE_BYTES}
    assert (record["reported"], record["counted"], record["is_fresh"]) == (261, None, None)


@pytest.mark.parametrize(("place", "differs"), [(0, True), (-1, True), (EDGE_BYTES + 9, False)])
def test_files_of_one_size_differ_if_their_edges_do(place: int, differs: bool, tmp_path: Path) -> None:
    data = bytearray(3 * EDGE_BYTES)
    (tmp_path / "1").write_bytes(data)
    data[place] = 1
    (tmp_path / "2").write_bytes(data)
    hashes = {resume._fingerprint(str(tmp_path / name)) for name in "12"}
    assert len(hashes) == 1 + differs


class Lion(torch.optim.Optimizer):
    """Keeps a tensor for each parameter, not a dict."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = torch.ones(2)


def adam(step: Any) -> dict[str, Any]:
    return {"step": step, "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)}


@pytest.mark.parametrize(
    ("kind", "options", "states", "counted", "is_fresh"),
    [
        (torch.optim.Adam, {}, [], 0, True),
        (torch.optim.Adam, {}, [adam(torch.tensor(261.0))], 261, False),
        # the expert has had half as many batches
        (torch.optim.Adam, {}, [adam(torch.tensor(130.0)), adam(torch.tensor(261.0))], 261, False),
        (torch.optim.SGD, {}, [], None, None),  # it never has a state
        (torch.optim.SGD, {"momentum": 0.9}, [], None, True),
        (Lion, {}, [], None, True),
        (Lion, {}, [torch.ones(2)], None, False),
    ],
)
def test_the_optimizer_tells_the_step_at_which_the_rank_begins(
    kind: Any, options: dict[str, Any], states: list[Any], counted: int | None, is_fresh: bool | None, audited: Audited
) -> None:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(1)
    optimizer = kind(weights, **{"lr": 0.1, **options})
    optimizer.state.update(zip(weights, states, strict=False))
    audited[0].before_step(optimizer)
    if kind is not Lion or not states:
        optimizer.step()
    audited[0].before_step(optimizer)
    record = audited[1]()
    assert (record["reported"], record["counted"], record["is_fresh"]) == (None, counted, is_fresh)


def test_a_step_without_a_learning_rate_is_none(audited: Audited, tmp_path: Path) -> None:
    """torch.distributed.checkpoint takes one to make an optimizer's state before it loads it."""
    for _ in range(2):
        audited[0].before_step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0))
    assert not (tmp_path / "heartbeat.resume").exists()
