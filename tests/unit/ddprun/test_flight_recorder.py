"""The collectives that a rank reports, by torch's flight recorders, and the size of the evidence that a node keeps."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ddprun.health import diagnosis
from ddprun.health.diagnosis import MAX_DIAGNOSIS_BYTES, Diagnosis, read_collectives
from ddprun.ranks.rank_server import serve
from ddprun.system.file_writer import FileWriter
from ddpwire.run_files import diagnosis_file


class Unrecorded(dist.ProcessGroup):
    """A backend in Python: torch attaches no flight recorder to a group that a backend replaces."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's own name
        return "unrecorded"


dist.Backend.register_backend(
    "unrecorded", lambda _store, rank, size, _timeout: Unrecorded(rank, size), devices=["cpu"]
)


@contextmanager
def group(backend: str) -> Iterator[None]:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ddprun sets it for ranks. torch reads it when a process makes its first group."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")


def answer(folder: Path) -> dict[str, Any]:
    serve(folder / "rank-0")
    return read_collectives(folder / "rank-0")


@pytest.mark.parametrize("takes_a_backend", [False, True], ids=["before torch 2.15", "installed"])
def test_collectives_of_gloo_are_read_in_every_torch(
    takes_a_backend: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = c10d._dump_fr_trace_json
    if not takes_a_backend:
        monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda collectives, active: dump(collectives, active))
    with group("gloo"):
        dist.all_reduce(torch.ones(3))
        record = answer(tmp_path)
    assert "unknown" not in record
    assert [(call["op"], call["sizes"]) for call in record["collectives"]][-1] == ("all_reduce", [[3]])


def test_a_backend_without_a_flight_recorder_is_unknown(tmp_path: Path) -> None:
    with group("unrecorded"):
        assert "unrecorded" in answer(tmp_path)["unknown"]


FRAME = ("/" + "f" * 498, 7, "n" * 499)  # as long as faulthandler writes them
THREADS = [[FRAME] * diagnosis.MAX_FRAMES] * diagnosis.MAX_THREADS
COLLECTIVE = {"op": "all_reduce", "sizes": [[1]] * 200, "at": 1.0}


@pytest.mark.parametrize(("ranks", "kept"), [(1, 8), (16, 3), (200, 1)])
def test_a_diagnosis_is_bounded_and_has_every_rank(tmp_path, monkeypatch, ranks, kept):
    sample = {"state": "S", "threads": THREADS, "time": 1.0}
    children = [{"pid": pid, "threads": None} for pid in range(diagnosis.MAX_CHILDREN)]
    entry = {"samples": [sample] * 2, "children": children, "collectives": [COLLECTIVE] * diagnosis.MAX_COLLECTIVES}
    evidence = [entry | {"rank": rank} for rank in range(ranks)]
    monkeypatch.setattr(diagnosis, "collect", lambda *_: copy.deepcopy(evidence))
    Diagnosis(tmp_path, 0, tmp_path, FileWriter()).keep()
    data = (tmp_path / diagnosis_file(1)).read_bytes()
    assert len(data) <= MAX_DIAGNOSIS_BYTES
    answer = json.loads(data)
    assert [entry["rank"] for entry in answer["ranks"]] == [*range(ranks)]
    assert {len(entry["samples"][-1]["threads"]) for entry in answer["ranks"]} == {kept}
    assert answer.get("shortened", False) == (ranks > 1)
