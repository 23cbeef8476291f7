"""Batches that are divided by shares: the weights stay the same, and shares that are measured make steps shorter."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.nightly.ddptrain.test_exact import weights
from torch import Tensor

from ddptrain.checkpoint import load_checkpoint
from ddptrain.data.sampling import shard_sizes

HERE = Path(__file__).parent
EXACT = ("--epochs=3", "--precision=fp64", "--checkpoint-every=5", "--keep=0")
SLOW = "0.003,0.006"  # seconds a sample on each rank, besides the real ones
STEPS_PER_EPOCH = 45


def worst(these: dict[str, Tensor], those: dict[str, Tensor]) -> float:
    return max(float((these[name] - weight).abs().max() / weight.abs().max()) for name, weight in those.items())


@pytest.fixture
def equal(train: Callable[..., list], tmp_path: Path) -> dict[str, Tensor]:
    """The weights of an undisturbed training with equal shares."""
    command = (str(HERE / "exact.py"),)
    assert train("0", *EXACT, "--deterministic", "--checkpoint-dir=equal", size=2, command=command)[0].code == 0
    return weights(tmp_path / "equal")


def test_given_shares_give_the_weights_of_equal_ones_and_a_killed_run_continues_bit_for_bit(
    train: Callable[..., list], start: Callable, equal: dict[str, Tensor], tmp_path: Path
) -> None:
    options, script = ("0", *EXACT, "--deterministic", "--balance=3:1"), (str(HERE / "exact.py"),)
    whole = train(*options, "--checkpoint-dir=whole", size=2, command=script)[0]
    assert worst(weights(tmp_path / "whole"), equal) < 1e-12
    world = start(*options, "--checkpoint-dir=killed", size=2, command=script)
    world.wait_for("epoch  1/3")
    world.kill()
    again = train(*options, "--checkpoint-dir=killed", size=2, command=script)[0]
    assert again.fingerprint == whole.fingerprint
    refused = train("0", *EXACT, "--deterministic", "--epochs=4", "--checkpoint-dir=killed", size=2, command=script)
    assert refused[0].code == 78  # other shares would round differently


def test_measured_shares_fit_the_speeds_and_are_kept_in_the_checkpoint(
    train: Callable[..., list], start: Callable, equal: dict[str, Tensor], tmp_path: Path
) -> None:
    options, script = (SLOW, *EXACT, "--balance=auto"), (str(HERE / "slowed.py"),)
    whole = train(*options, "--checkpoint-dir=whole", size=2, command=script)[0]
    assert whole.code == 0, whole.err
    fast, slow = map(int, re.findall(r"--balance (\d+):(\d+)", whole.out)[0])
    assert 1.3 < fast / slow < 2.5
    assert worst(weights(tmp_path / "whole"), equal) < 1e-9

    world = start(*options, "--checkpoint-dir=killed", size=2, command=script)
    world.wait_for("epoch  2/3")
    world.kill()
    killed = tmp_path / "killed"
    for path in killed.glob("step-*"):  # so that it continues in the middle of an epoch whose shares were measured
        if int(path.name[5:13]) > STEPS_PER_EPOCH + 20:
            path.unlink()
    first, middle = (load_checkpoint(killed / f"step-{step:08d}.pt") for step in (40, STEPS_PER_EPOCH + 20))
    assert first.parts["balance"]["shares"] == [1, 1]
    assert 1.3 < middle.parts["balance"]["shares"][0] / middle.parts["balance"]["shares"][1] < 2.5
    again = train(*options, "--checkpoint-dir=killed", size=2, command=script)
    assert again[0].code == 0, again[0].err
    assert worst(weights(killed), equal) < 1e-9
    alone = train(*options, "--epochs=4", "--checkpoint-dir=killed", size=1, command=script)  # measured anew
    assert alone[0].code == 0, alone[0].err


def test_sizes_are_within_one_sample_of_the_shares() -> None:
    numbers = random.Random(0)
    for _ in range(200):
        shares = tuple(numbers.randint(1, 1000) for _ in range(numbers.randint(1, 6)))
        num = numbers.randint(1, 500)
        sizes = shard_sizes(num, shares)
        assert sum(sizes) == num
        assert all(abs(size - num * share / sum(shares)) < 1 for size, share in zip(sizes, shares, strict=True))
