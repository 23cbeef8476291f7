"""The size of the evidence that a node keeps; tests/e2e/test_hang.py has real ranks."""

import copy
import json

import pytest

from ddprun.health import diagnosis
from ddprun.health.diagnosis import MAX_DIAGNOSIS_BYTES, Diagnosis
from ddprun.system.file_writer import FileWriter
from ddpwire.run_files import diagnosis_file

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
