"""A folder of pictures: what is found, decoded, kept, and refused."""

import time
from collections.abc import Callable
from pathlib import Path

from tests.facts import assert_names
from tests.unit.ddptrain.formats import write_pictures


def test_two_ranks_report_a_corrupt_picture_once_and_at_once(train: Callable[..., list], tmp_path: Path) -> None:
    write_pictures(tmp_path / "pictures")
    (tmp_path / "pictures" / "class2" / "3.png").write_bytes(b"torn")
    began = time.monotonic()
    ended = train("--data=folder", "--data-dir=pictures", size=2)
    took_s = time.monotonic() - began
    assert [(one.code, one.out) for one in ended] == [(65, "")] * 2
    assert_names(ended[0].err.rpartition(": ")[0], "pictures/class2/3.png")
    assert (ended[0].err.count("\n"), ended[1].err) == (1, "")
    assert took_s < 60  # on a busy machine; docs/benchmarks.md has it on a quiet one
