"""What ranks have counted is kept over their starts, in few files."""

import struct
from pathlib import Path

import pytest
from tests.unit.ddprun.test_rank_metrics import count, samples

from ddprun.metrics import metrics


def test_the_merged_file_does_not_grow_with_the_number_of_restarts(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    folder.mkdir()
    count(folder)
    sizes = []
    for _ in range(3):
        count(folder)
        metrics.set_gauges_aside(tmp_path, 0)
        metrics.prepare_rank_dir(folder)
        sizes.append((folder / "counter_0.db").stat().st_size)
    assert sizes[0] == sizes[1] == sizes[2] < 4096
    assert samples(folder)["ddp_steps_total", "a"] == 40


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
    folder = tmp_path / "rank-0"
    folder.mkdir()
    count(folder)
    before = samples(folder)
    (folder / "counter_1.db").write_bytes(content)
    assert samples(folder) == before
    metrics.set_gauges_aside(tmp_path, 0)
    count(folder)
    metrics.set_gauges_aside(tmp_path, 0)
    metrics.prepare_rank_dir(folder)
    assert (folder / "counter_1.bad").read_bytes() == content
    assert (folder / "counter_0.db").stat().st_size < 4096
    assert samples(folder)["ddp_steps_total", "a"] == 20
