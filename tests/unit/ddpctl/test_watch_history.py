"""The nodes' histories as one."""

import pytest

from ddpctl.watch.history import History

ROWS = {
    0: ({"time": 0.0}, {"time": 10.0, "n": 100.0, "loss": 2.0}, {"time": 20.0, "n": 300.0}, {"time": 40.0, "n": 100.0}),
    1: ({"time": 0.0, "n": 0.0}, {"time": 20.0, "n": 100.0, "loss": 1.0}),
}
COURSE = History(nodes=ROWS)  # type: ignore[arg-type]


def test_moments_go_evenly_from_the_first_row_to_the_last() -> None:
    assert (COURSE.begin, COURSE.end) == (0.0, 40.0)
    assert COURSE.moments(3) == (0.0, 20.0, 40.0)
    assert COURSE.moments(100) == pytest.approx((0.0, 40 / 3, 80 / 3, 40.0))
    assert History(nodes={}).moments(9) == ()
    assert History(nodes={0: ({"time": 3.0},)}).moments(9) == ()


def test_counters_grow_over_all_nodes_and_may_be_begun_anew() -> None:
    moments = (0.0, 10.0, 20.0, 40.0)
    assert COURSE.rate("n", moments) == ((50 + 100) / 10, (50 + 200) / 10, (0 + 100) / 20)
    assert COURSE.rate("none", moments) == (None, None, None)
    assert History(nodes={}).rate("n", moments) == ()


def test_a_steady_counter_has_a_steady_rate_whatever_the_moments() -> None:
    rows = tuple({"time": float(second), "n": 100.0 * second} for second in range(88))
    steady = History(nodes={0: rows})
    assert steady.rate("n", steady.moments(60)) == pytest.approx([100.0] * 59)


def test_of_gauges_the_largest_counts() -> None:
    assert COURSE.gauge("loss", (0.0, 10.0, 20.0)) == (None, 2.0, 2.0)
    assert (COURSE.last("loss"), COURSE.last("none")) == (2.0, None)
    assert COURSE.total("n") == 200.0
    assert (COURSE.first_time("n"), COURSE.first_time("none")) == ((0.0, 0.0), None)
