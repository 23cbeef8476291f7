"""What ``--deterministic`` promises: a training that was disturbed ends with the weights of one that was not.

bench/exact.py has 36 rows. A row that differs from another only in the model or the moment is left to the benchmark:
the large models need minutes on a processor without fast bf16.
"""

import re
import subprocess
import sys

import exact
import pytest

TRIED = {
    "ranks": "^(1 rank|3 ranks|2 x 2 ranks)$",
    "models": "^(simple|convnet: (batch|mixup).*|imageclassifier: AdamW.*|resnet18: accumulation)$",
    "moments": "^killed (at the first|in the eval|while|twice)|^stopped (in the middle|while a checkpoint's)",
    "ways": "",
}


def test_each_group_of_rows_is_tried() -> None:
    assert set(TRIED) == {row.group for row in exact.ROWS}


@pytest.mark.parametrize("group", TRIED)
def test_rows_of_the_table(group: str) -> None:
    rows = [row for row in exact.ROWS if row.group == group and re.search(TRIED[group], row.title)]
    command = [sys.executable, exact.__file__, "--groups", group, "--rows", TRIED[group]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1740, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal |") == len(rows) > 2
