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
    record.install()
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
    assert {name: size for name, (size, _) in record["files"].items()} == {"last.pt": 3 * EDGE_BYTES, "missing.pt": -1}
    assert (record["reported"], record["counted"], record["is_fresh"]) == (261, None, None)


def test_a_relative_path_and_a_link_to_the_folder_lead_to_the_same_file(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("checkpoints")
    (tmp_path / "heartbeat.resume").unlink(missing_ok=True)
    other = ResumeRecord(str(tmp_path / "link"), str(tmp_path / "other"))
    other.install()
    monkeypatch.chdir(tmp_path)
    Path("checkpoints/../checkpoints/last.pt").read_bytes()
    for record in (audited[0], other):
        record.begin(0)
    assert audited[1]()["files"] == json.loads((tmp_path / "other").read_text())["files"] != {}


@pytest.mark.parametrize(("place", "differs"), [(0, True), (-1, True), (EDGE_BYTES + 9, False)])
def test_files_of_one_size_differ_if_their_edges_do(place: int, differs: bool, tmp_path: Path) -> None:
    data = bytearray(3 * EDGE_BYTES)
    (tmp_path / "1").write_bytes(data)
    data[place] = 1
    (tmp_path / "2").write_bytes(data)
    hashes = {resume._fingerprint(str(tmp_path / name)) for name in "12"}
    assert len(hashes) == 1 + differs


@pytest.mark.parametrize(("kind", "step"), [(torch.optim.Adam, 261), (torch.optim.SGD, None)])
def test_the_optimizer_tells_the_step_at_which_the_rank_begins(kind: Any, step: int | None, audited: Audited) -> None:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    optimizer = kind([weight], lr=0.1)
    if step:
        optimizer.state[weight] = {
            "step": torch.tensor(float(step)), "exp_avg": torch.zeros(1), "exp_avg_sq": torch.zeros(1)
        }  # fmt: skip
    for _ in range(2):
        audited[0].before_step(optimizer)
        optimizer.step()
    record = audited[1]()
    assert (record["reported"], record["counted"], record["is_fresh"]) == (None, step, step is None)


def test_a_step_without_a_learning_rate_is_none(audited: Audited, tmp_path: Path) -> None:
    """torch.distributed.checkpoint takes one to make an optimizer's state before it loads it."""
    for _ in range(2):
        audited[0].before_step(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0))
    assert not (tmp_path / "heartbeat.resume").exists()
