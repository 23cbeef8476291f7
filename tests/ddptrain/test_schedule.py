import pytest

from ddptrain.schedule import learning_rate


def rates(schedule: str) -> list[float]:
    return [learning_rate(schedule, peak=0.5, step=step, num_steps=10) for step in range(10)]


def test_one_cycle_goes_up_for_three_tenths_and_down() -> None:
    ten = rates("one-cycle")
    assert ten[0] == pytest.approx(0.02)
    assert ten[3] == 0.5
    assert ten[:4] == sorted(ten[:4])
    assert ten[3:] == sorted(ten[3:], reverse=True)
    assert 0 < ten[9] < 0.05


def test_cosine_goes_down_from_the_peak() -> None:
    ten = rates("cosine")
    assert ten[0] == 0.5
    assert ten[5] == pytest.approx(0.25)
    assert ten == sorted(ten, reverse=True)
