"""The model of what each way of communication costs, and the choice that follows from it."""

import math

import pytest

from ddpwire.communication import (
    CANDIDATES,
    Link,
    choose,
    exchanged_bytes,
    fit_link,
    matrices,
    parse_way,
    step_seconds,
)

# The parameters of a ResNet-18 for small images.
RESNET_18: list[tuple[int, ...]] = [(64, 3, 3, 3)]
for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
    RESNET_18 += [(outputs, inputs, 3, 3)] + [(outputs, outputs, 3, 3)] * 3
    RESNET_18 += [(outputs, inputs, 1, 1)] if inputs != outputs else []
RESNET_18 += [(10, 512)]
BYTES = 4 * sum(map(math.prod, RESNET_18))


def link(mbit: float, *, num_ranks: int = 2) -> Link:
    return Link(num_ranks=num_ranks, latency_s=0.0005, bytes_per_s=mbit * 0.125e6)


@pytest.mark.parametrize(
    ("way", "times_less"),
    [("plain", 1), ("bf16", 2), ("fp16", 2), ("localsgd:8", 8), ("diloco:32", 32)],
)
def test_bytes_of_a_step(way: str, times_less: int) -> None:
    assert exchanged_bytes(parse_way(way), RESNET_18) == BYTES / times_less


@pytest.mark.parametrize(("rank", "times_less"), [(1, 243), (2, 136), (4, 72)])
def test_powersgd_sends_as_much_less_as_its_authors_measured(rank: int, times_less: int) -> None:
    """arXiv 1905.13727, table 3, for a ResNet-18. The authors also count biases and norms."""
    small = [(512,)] * 18
    sent = exchanged_bytes(parse_way(f"powersgd:{rank}"), [*RESNET_18, *small])
    assert (BYTES + 4 * 512 * 18) / sent == pytest.approx(times_less, rel=0.1)


def test_powersgd_sends_small_and_flat_parameters_whole() -> None:
    assert exchanged_bytes(parse_way("powersgd:4"), [(10,), (), (4, 4), (0, 3)]) == 4 * (10 + 1 + 16)


def test_a_link_is_fitted_to_all_reduces() -> None:
    fitted = fit_link(4, {4096: 0.001, 16 << 20: 2.001})
    assert [fitted.latency_s, fitted.bytes_per_s] == pytest.approx([0.001, 1.5 * (16 << 20) / 2])


@pytest.mark.parametrize(("mbit", "seconds"), [(100, 3.6), (1000, 0.36)])
def test_plain_waits_for_the_link(mbit: float, seconds: float) -> None:
    """Only a part of the exchange can be hidden behind the backward pass."""
    expected = step_seconds(parse_way("plain"), RESNET_18, link(mbit), compute_s=0.1)
    assert 0.1 + seconds - 0.1 <= expected <= 0.1 + seconds + 0.01


@pytest.mark.parametrize(
    ("mbit", "compute_s", "kinds"),
    [
        (100_000, 0.2, {"plain"}),
        (10_000, 0.2, {"plain"}),
        (100, 0.2, {"powersgd", "diloco"}),
        (10, 0.2, {"powersgd", "diloco"}),
        (100, 100.0, {"plain"}),
    ],
)
def test_auto_gives_accuracy_up_only_on_a_slow_network(mbit: float, compute_s: float, kinds: set[str]) -> None:
    seconds = choose(RESNET_18, link(mbit), compute_s=compute_s)
    assert next(iter(seconds)).kind in kinds
    assert seconds.keys() == {*CANDIDATES}


def test_auto_does_not_give_accuracy_up_for_a_third_of_the_time() -> None:
    """The link between two ranks of one machine with 2 cores, as measured."""
    seconds = choose(RESNET_18, Link(num_ranks=2, latency_s=0.00027, bytes_per_s=754e6), compute_s=0.1004)
    assert next(iter(seconds)).kind == "plain"
    assert 1.25 < seconds[parse_way("plain")] / seconds[parse_way("diloco:32")] < 2


def test_matrices_have_the_number_of_parameters() -> None:
    for number in (1, 1000, 11.7e6, 7e9):
        assert sum(map(math.prod, matrices(number))) == pytest.approx(number, abs=512)
