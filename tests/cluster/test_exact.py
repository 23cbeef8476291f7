"""A deterministic training that was disturbed ends with the weights of one that was not: one row of each group."""

import re
from dataclasses import replace

import exact
import pytest

# By group: a row of bench/exact.py.
TRIED = {
    "ranks": "2 x 2 ranks",
    "models": "convnet: batch norm, average of the weights",
    "moments": "killed twice in a row",
    "ways": "stopped, ddpctl launch --resume",
    "communication": "powersgd:2, killed in step 13",
}


@pytest.mark.parametrize("group", TRIED)
def test_disturbed_training_ends_with_the_same_weights(group: str) -> None:
    (row,) = (row for row in exact.ROWS if (row.group, row.title) == (group, TRIED[group]))
    options = [re.sub("samples=144", "samples=72", re.sub("batch-size=24", "batch-size=12", o)) for o in row.options]
    tried = exact.try_row(replace(row, options=tuple(options)))
    assert tried.disturbed == tried.undisturbed
    assert tried.starts > 1


def test_every_group_of_rows_is_tried() -> None:
    assert set(TRIED) == {row.group for row in exact.ROWS}
