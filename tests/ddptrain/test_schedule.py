import dataclasses

import pytest

from ddptrain.options import parse
from ddptrain.options.optimizer import OptimizerOptions
from ddptrain.schedule import learning_rate

HOW = dataclasses.replace(parse([], {}).optimizer, lr=0.5)


def rates(schedule: str, *, ranks: int = 1, epochs: int = 10, **how: object) -> list[float]:
    """Of each step of epochs of two steps."""
    options: OptimizerOptions = dataclasses.replace(HOW, schedule=schedule, **how)
    steps = range(2 * epochs)
    return [learning_rate(options, ranks=ranks, step=step, num_steps=2 * epochs, steps_per_epoch=2) for step in steps]


def test_one_cycle_goes_up_for_three_tenths_and_down() -> None:
    ten = rates("one-cycle", epochs=5)
    assert ten[0] == pytest.approx(0.02)
    assert ten[3] == 0.5
    assert ten[:4] == sorted(ten[:4])
    assert ten[3:] == sorted(ten[3:], reverse=True)
    assert 0 < ten[9] < 0.05


def test_cosine_goes_down_from_the_peak() -> None:
    ten = rates("cosine", epochs=5)
    assert ten[0] == 0.5
    assert ten[5] == pytest.approx(0.25)
    assert ten == sorted(ten, reverse=True)


def test_steps_go_down_after_their_epochs() -> None:
    twelve = rates("steps", epochs=6, milestones=(2, 5), gamma=0.2)
    assert twelve == pytest.approx([0.5] * 4 + [0.1] * 6 + [0.02] * 2)
    assert rates("constant") == [0.5] * 20


def test_a_warm_up_leads_to_the_peak_and_ends_before_the_training() -> None:
    assert rates("constant", epochs=3, warmup=1.5) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])
    assert rates("cosine", epochs=3, warmup=1)[2] == 0.5
    assert rates("steps", epochs=2, warmup=9)[3] == 0.5


def test_a_rate_scaled_by_the_ranks_is_warmed_up_from_the_plain_one() -> None:
    scaled = rates("cosine", ranks=4, epochs=40, scale_lr=True)
    assert 0.5 < scaled[0] < 0.7
    assert scaled[10] == max(scaled) == 2.0  # after five epochs
    assert scaled[:11] == sorted(scaled[:11])
    short = rates("cosine", ranks=4, epochs=8, scale_lr=True)
    assert short[4] == max(short) == 2.0  # after a quarter of them
    assert rates("cosine", ranks=4, epochs=8, scale_lr=True, warmup=0.0)[0] == 2.0
    assert max(rates("one-cycle", ranks=4, scale_lr=True)) == 2.0
