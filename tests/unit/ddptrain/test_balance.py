"""The division of a batch by the ranks' speeds: sizes, exact gradients, the measured shares, and what is refused."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.messages import assert_names, refused
from torch.nn import functional

from ddptrain import balance
from ddptrain.balance import Balance, measured_shares
from ddptrain.config import parse_options
from ddptrain.data.sampling import batches, epoch_order, shard_of, shard_sizes
from ddptrain.distributed import RankInfo, check_strategy
from ddptrain.errors import TrainError
from ddptrain.straggler import RankHost, StragglerEvent, straggler_message


def make(given: str, *more: str, rank: int = 0, size: int = 2) -> Balance:
    options = parse_options([f"--balance={given}", *more], {})
    return Balance(options, RankInfo(rank=rank, size=size))


def test_equal_shares_are_divided_as_torch_divides() -> None:
    for num, size in itertools.product(range(1, 40), range(1, 9)):
        expected = tuple(map(len, torch.arange(num).tensor_split(size)))
        assert shard_sizes(num, (1,) * size) == expected


def gradient_of(samples: torch.Tensor, targets: torch.Tensor, shares: tuple[int, ...]) -> torch.Tensor:
    """Return the mean of the ranks' gradients, as DDP computes it."""
    gradients = []
    for rank in range(len(shares)):
        shard = shard_of(torch.arange(len(samples)), rank=rank, shares=shares)
        weights = torch.full((3, 5), 0.1, dtype=torch.float64, requires_grad=True)
        logits = samples[shard.indices_N] @ weights
        (shard.weight * functional.cross_entropy(logits, targets[shard.indices_N], reduction="sum")).backward()
        gradients.append(weights.grad)
    return torch.stack(cast(Any, gradients)).mean(0)


@pytest.mark.parametrize("num", [32, 7, 1])
def test_unequal_shares_give_the_gradient_of_the_whole_batch(num: int) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    targets = torch.randint(5, (num,), generator=generator)
    whole = gradient_of(samples, targets, (1,))
    for shares in ((1, 1), (3, 1), (1, 9, 4), (999, 1)):
        torch.testing.assert_close(gradient_of(samples, targets, shares), whole, rtol=1e-12, atol=1e-15)


def test_each_sample_is_used_once_an_epoch() -> None:
    order = epoch_order(103, seed=0, epoch=0)
    shards = [
        shard_of(batch, rank=rank, shares=(5, 2, 1)) for batch in batches(order, 16, first=0) for rank in range(3)
    ]
    used = torch.cat([shard.indices_N[: shard.num_samples] for shard in shards])
    assert torch.equal(used.sort().values, torch.arange(103))


@pytest.mark.parametrize(
    ("shares", "own_s", "expected", "step_s"),
    [
        ((1, 1), (1.0, 2.0), (667, 333), 4 / 3),
        ((3, 1), (1.5, 0.5), (500, 500), 1.0),
        ((2, 1), (1.0, 1.0), (667, 333), 1.0),
    ],
)
def test_measured_shares_give_all_ranks_the_same_time(shares: Any, own_s: Any, expected: Any, step_s: float) -> None:
    measured, seconds = measured_shares(shares, own_s)
    assert measured == expected
    assert seconds == pytest.approx(step_s)


@pytest.mark.parametrize(
    ("own_s", "num_own", "changes"),
    [((1.0, 2.0), 10, True), ((1.0, 2.0), 9, False), ((1.0, 1.04), 10, False), ((1.0, 1.2), 10, True)],
)
def test_shares_change_after_enough_steps_if_it_pays(
    own_s: tuple[float, ...], num_own: int, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    means = [mean_s if num_own >= balance.MIN_STEPS else 0.0 for mean_s in own_s]
    monkeypatch.setattr(balance, "gather", lambda _, __: means)
    auto = make("auto")
    phases = cast(Any, SimpleNamespace(own_total_s=own_s[0] * num_own, num_own=num_own, forget_own=lambda: None))
    assert auto.adapt(phases) is changes
    assert (auto.shares != (1, 1)) is changes


def test_shares_continue_from_a_checkpoint_of_as_many_ranks() -> None:
    saved = make("auto")
    saved.shares = (667, 333)
    for size, shares in ((2, (667, 333)), (3, (1, 1, 1))):
        resumed = make("auto", size=size)
        resumed.load_state_dict(saved.state_dict())
        assert resumed.shares == shares


def test_a_rank_is_called_slow_for_its_share() -> None:
    assert [make("3:1").percent(rank) for rank in (0, 1)] == [75, 25]
    assert make("off").percent(1) is None
    event, host = StragglerEvent(rank=1, ratio=2.0), RankHost(node=1, host="box2")
    assert_names(straggler_message(event, host, 7, 25.0), "step 7", "rank 1", "box2", "25 %", "2.0")
    assert "%" not in straggler_message(event, host, 7)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["3:1:1"], "3:1:1 3 2"),
        (["3"], "3 1 2"),
        (["auto", "--deterministic"], "--balance --deterministic"),
        (["auto", "--strategy=fsdp"], "--balance --strategy fsdp"),
    ],
)
def test_what_does_not_fit_is_refused(options: list[str], named: str) -> None:
    with refused(TrainError, *named.split(), code=78):
        make(*options)


@pytest.mark.parametrize("way", ["localsgd:8", "diloco:8", "auto"])
def test_ranks_that_exchange_weights_have_equal_shares(way: str) -> None:
    options = parse_options(["--balance=3:1", f"--communication={way}"], {})
    with refused(TrainError, "--communication", way, "--balance", code=78):
        check_strategy(options, RankInfo(size=2))
    check_strategy(parse_options(["--balance=3:1", "--communication=powersgd:4"], {}), RankInfo(size=2))
    check_strategy(parse_options(["--balance=2:2", f"--communication={way}"], {}), RankInfo(size=2))


@pytest.mark.parametrize("text", ["3", "on", "0:1", "1:", "1.5:1", "-1:2"])
def test_shares_that_are_no_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    if text == "3":
        assert make(text, size=1).shares == (3,)
        return
    with pytest.raises(SystemExit) as ended:
        make(text)
    assert ended.value.code == 2
    assert "--balance" in capsys.readouterr().err
