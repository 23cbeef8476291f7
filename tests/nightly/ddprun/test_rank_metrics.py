"""What ranks have counted is kept over their starts, without the files of ended processes."""

import struct
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddprun.test_rank_metrics import NO_PID, count, rank_series, samples

ODD_KEY = b"5       "
DAMAGED = {
    "torn": (4096).to_bytes(4, "little") + bytes(96),
    "negative": (-1).to_bytes(4, "little", signed=True) + bytes(96),
    "large": (2**31 - 1).to_bytes(4, "little") + bytes(96),
    "odd key": struct.pack("=iii8s4xdd", 40, 0, 8, ODD_KEY, 1.0, 0.0),
    "empty": b"",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_set_aside_and_the_others_are_read(content: bytes, tmp_path: Path) -> None:
    folder, series = tmp_path / "rank-0", rank_series(tmp_path)
    folder.mkdir()
    count(folder)
    before = samples(series)
    (folder / f"counter_{NO_PID}.db").write_bytes(content)
    assert samples(series) == before
    count(folder)
    series.keep_counts()
    assert (folder / f"counter_{NO_PID}.bad").read_bytes() == content
    assert not [*folder.glob("counter_*.db")]
    assert samples(series)["ddp_steps_total", "a"] == 20


@pytest.mark.parametrize(
    "sample", [["a_total", {}, "many"], ["a_total", {}, None], ["a_total", ["kind"], 1.0], ["a_total", {}], 7, None]
)
def test_damaged_counts_of_a_rank_are_left_out(tmp_path: Path, sample: Any) -> None:
    series = rank_series(tmp_path)
    sound = [["a", "Of mine.", "counter", [["a_total", {"kind": 1}, 3]]]]
    series.restore({"0": [["a", "Of mine.", "counter", [sample]]], "1": sound})
    collected = [sample for family in series.collect() for sample in family.samples if sample.name == "a_total"]
    assert [(sample.labels["kind"], sample.value) for sample in collected] == [("1", 3.0)]
