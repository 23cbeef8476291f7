"""What a bench is not compared with."""

from typing import Any

import pytest
from tests.unit.ddpctl.test_doctor import NOW, bench

from ddpctl.commands.checks import compared


@pytest.mark.parametrize(
    "last",
    [{}, {"last": None}, {"last": {"collectives": 3}}, {"last": bench(("all_reduce", 1, 1.0), time=0)},
     {"last": bench(("all_reduce", 1024, 0.0), time=0)}, {"last": {"collectives": NOW["collectives"]}},
     {"last": {**NOW, "ranks": 4, "time": 0}}],
)  # fmt: skip
def test_without_a_last_bench_of_the_same_sizes_and_ranks_nothing_is_compared(last: dict[str, Any]) -> None:
    assert compared({**NOW, **last}) == []
