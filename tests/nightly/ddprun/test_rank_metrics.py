"""What ranks have counted is kept over their starts, without the files of ended processes."""

import struct
from pathlib import Path

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
