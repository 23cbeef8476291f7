"""Where the time of ranks goes: the one that the others wait for is named and no other, and goodput counts them all."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.ranks import World, _environs

from ddptrain.straggler import StragglerEvent, StragglerPolicy, compute_skew


def test_the_median_of_two_is_the_faster_one() -> None:
    assert compute_skew([0.1, 0.3], 0) == pytest.approx((3.0, 1.0))
    assert compute_skew([0.1, 0.3], 1)[1] == pytest.approx(1 / 3)
    assert compute_skew([0.2, 0.1, 0.2, 0.25], 0)[0] == pytest.approx(1.25)


def reports(policy: StragglerPolicy, *comparisons: Sequence[float]) -> list[list[StragglerEvent]]:
    """What each comparison of a second reports."""
    return [policy.update(own_s, seconds=1.0) for own_s in comparisons]


WELL, SLOW_1 = (0.1, 0.1, 0.1), (0.1, 0.3, 0.1)


def test_a_rank_is_named_when_it_is_slow_in_a_row_and_once_and_of_two_slow_ones_both() -> None:
    heard = reports(StragglerPolicy(3), WELL, SLOW_1, SLOW_1, WELL, *[SLOW_1] * 6, WELL, SLOW_1, WELL, WELL, WELL)
    slow, well = [StragglerEvent(rank=1, ratio=pytest.approx(3.0))], [StragglerEvent(rank=1)]
    assert [event for event in heard if event] == [slow, well]
    assert 6 <= heard.index(slow) <= 9
    assert heard.index(well) == 13
    heard = reports(StragglerPolicy(4), *[(0.1, 0.3, 0.1, 0.31), (0.1, 0.31, 0.1, 0.3)] * 8)
    assert [event.rank for events in heard for event in events] == [1, 3]


def test_where_healthy_ranks_are_slow_now_and_then_it_takes_more_in_a_row() -> None:
    calm, busy = StragglerPolicy(2), StragglerPolicy(2)
    reports(calm, *[(0.1, 0.1)] * 200)
    assert not any(reports(busy, *[(0.1, 0.1), (0.3, 0.1), (0.1, 0.1), (0.1, 0.3)] * 50))
    assert [bool(events) for events in reports(calm, *[(0.1, 0.3)] * 12)].index(True) == 3
    heard = [bool(events) for events in reports(busy, *[(0.1, 0.3)] * 12)]
    assert 6 <= heard.index(True) <= 9


TRAINING = ("--data=synthetic", "--synthetic-samples=8", "--batch-size=4", "--epochs=1", "--device=cpu")


def test_the_report_at_the_end_counts_all_ranks_and_all_of_their_starts(tmp_path: Path) -> None:
    """An earlier start of rank 1 has lost 100,000 s, which is 50,000 s per rank."""
    environs = [*_environs(2, 2, {})]
    environs[1] |= {"DDP_SPENT_BEFORE": "productive=0.5,recompute=99999.5", "DDP_LOST_BEFORE": "restart=1"}
    first, second = World(["-m", "ddptrain", *TRAINING], cwd=tmp_path, environs=environs, executed=False).end()
    assert (first.code, second.code) == (0, 0), first.err + second.err
    (reported,) = re.findall(r"^goodput +(\d+) % of ([0-9.]+) s per rank", first.out, re.MULTILINE)
    assert (reported[0], float(reported[1]) > 50_000) == ("0", True)
