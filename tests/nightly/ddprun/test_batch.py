"""Variations of a batch step's signals."""

import pytest
from tests.unit.ddprun import test_batch
from tests.unit.ddprun.test_batch import INT, USR2

step = test_batch.step  # the fixture


@pytest.mark.parametrize(
    ("signals", "wanted"),
    [
        ([USR2], 1),
        ([INT, INT], 2),
    ],
)
def test_only_a_second_request_to_stop_is_a_second_signal(step, signals, wanted):
    test_batch.test_only_a_second_request_to_stop_is_a_second_signal(step, signals, wanted)
