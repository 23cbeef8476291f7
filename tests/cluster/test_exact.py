"""What ``--deterministic`` promises: a training that was disturbed ends with the weights of one that was not.

bench/exact.py has 36 rows. A row that differs from another only in the model or the moment is left to the benchmark:
the large models need minutes on a processor without fast bf16. The images and batches of the models are smaller here.
"""

import re
import sys
from dataclasses import replace

import exact
import pytest

TRIED = {
    "ranks": "^(1 rank|3 ranks|2 x 2 ranks)$",
    "models": "^(simple|convnet: (batch|mixup).*|imageclassifier: AdamW.*|resnet18: accumulation)$",
    "moments": "^killed (at the first|in the eval|while|twice)|^stopped (in the middle|while a checkpoint's)",
    "ways": "",
}
SMALLER = {
    "--synthetic-shape=3x32x32": "--synthetic-shape=3x16x16",
    "--synthetic-samples=144": "--synthetic-samples=72",
    "--batch-size=24": "--batch-size=12",
}


def test_each_group_of_rows_is_tried() -> None:
    assert set(TRIED) == {row.group for row in exact.ROWS}


@pytest.mark.parametrize("group", TRIED)
def test_rows_of_the_table(group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in exact.ROWS if row.group == group and re.search(TRIED[group], row.title)]
    smaller = (replace(row, options=tuple(SMALLER.get(option, option) for option in row.options)) for row in rows)
    monkeypatch.setattr(exact, "ROWS", tuple(smaller))
    monkeypatch.setattr(sys, "argv", ["exact.py", "--groups", group])
    with pytest.raises(SystemExit) as ended:
        exact.main()
    said, differ = capsys.readouterr()
    assert ended.value.code == 0, said + differ
    assert said.count(" equal |") == len(rows) > 2
