"""What ``--deterministic`` promises: a training that was disturbed ends with the weights of one that was not."""

import subprocess
import sys

import exact
import pytest


@pytest.mark.parametrize("group", dict.fromkeys(row.group for row in exact.ROWS))
def test_every_row_of_the_table(group: str) -> None:
    command = [sys.executable, exact.__file__, "--groups", group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1740, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal |") == sum(row.group == group for row in exact.ROWS)
