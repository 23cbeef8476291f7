"""The sizes that ``ddpctl bench`` takes, and its comparison with the target's last bench."""

import time
from typing import Any

import pytest

from ddpctl.commands.checks import compared, read_sizes
from ddpctl.errors import UsageError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4096", [4096]),
        ("64K,16M", [64 << 10, 16 << 20]),
        ("1g, 64KiB ,64kb", [64 << 10, 1 << 30]),  # in order, each once
        ("64G", [1 << 36]),
    ],
)
def test_sizes_are_bytes_in_order(text: str, sizes: list[int]) -> None:
    assert read_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5M", "64K,", "64T", "65G", "9999999", "K"])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_sizes(text)


def bench(*rows: tuple[str, int, float], **more: Any) -> dict[str, Any]:
    names = ("collective", "bytes", "busbw")
    return {
        "collectives": [dict(zip(names, row, strict=True)) for row in rows],
        "nodes": ["a", "b"],
        "ranks": 2,
        **more,
    }


NOW = bench(("all_reduce", 1024, 2.0), ("all_reduce", 4096, 4.0), ("broadcast", 1024, 1.0), ("gather", 64, 1.0))


def test_the_ratio_is_the_median_of_the_collectives_and_a_low_one_is_named() -> None:
    old = bench(("all_reduce", 1024, 2.0), ("all_reduce", 4096, 2.0), ("broadcast", 1024, 4.0), time=time.time() - 60)
    first, second = compared({**NOW, "last": old})
    assert first.startswith("busbw: 0.88 of the last bench's (")  # of 1.5 and 0.25; gather has no former size
    assert second == "less than half of the last bench: broadcast 0.25"
    (line,) = compared({**NOW, "last": {**NOW, "nodes": ["c"], "time": time.time()}})
    assert line.startswith("busbw: 1.00 of the last bench's, which was on other nodes (")


@pytest.mark.parametrize(
    "last",
    [{}, {"last": None}, {"last": {"collectives": 3}}, {"last": bench(("all_reduce", 1, 1.0), time=0)},
     {"last": bench(("all_reduce", 1024, 0.0), time=0)}, {"last": {"collectives": NOW["collectives"]}},
     {"last": {**NOW, "ranks": 4, "time": 0}}],
)  # fmt: skip
def test_without_a_last_bench_of_the_same_sizes_and_ranks_nothing_is_compared(last: dict[str, Any]) -> None:
    assert compared({**NOW, **last}) == []
