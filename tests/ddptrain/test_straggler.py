"""The rank that the others wait for is named, and no other ever."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.straggler import Judge, Skew, compare

PACED = """
import os, runpy, sys, time
from ddptrain.input.batches import Preparation

batch, steps = Preparation.batch, 0

def paced(preparation, indices_B, *, epoch):
    # Every rank takes 70 ms, and rank 1 three times as long from step 46 on.
    global steps
    steps += 1
    time.sleep(0.21 if os.environ["RANK"] == "1" and steps > 45 else 0.07)
    return batch(preparation, indices_B, epoch=epoch)

Preparation.batch = paced
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


@pytest.mark.parametrize("size", [2, 3])
def test_named_within_20_steps_and_nobody_in_1000_healthy_ones(train: Callable[..., list], size: int) -> None:
    ended = train(size=size, command=(str(Path(__file__).with_name("straggling.py")),))
    assert [(one.code, one.err) for one in ended] == [(0, "")] * size
    slow, again = ended[0].out.splitlines()
    said = re.fullmatch(r"step (\d+): rank 1 is slow: a step takes it (\d\.\d) times as long as the others", slow)
    assert said, slow
    assert 1000 < int(said[1]) <= 1020
    assert 2 < float(said[2]) < 4.5
    recovered = re.fullmatch(r"step (\d+): rank 1 is as fast as the others again", again)
    assert recovered
    assert 1050 < int(recovered[1]) <= 1080


def test_a_training_names_its_slow_rank(train: Callable[..., list]) -> None:
    rank_0, rank_1 = train("--epochs", "2", size=2, command=("-c", PACED))
    assert (rank_0.code, rank_0.err, rank_1.out, rank_1.err) == (0, "", "", "")
    said = re.findall(r"^step (\d+): (rank \d is slow): a step takes it \d+\.\d times", rank_0.out, re.MULTILINE)
    assert [what for _, what in said] == ["rank 1 is slow"]
    assert 45 < int(said[0][0]) <= 90  # after a second of it; the steps are quick, and the machine may be busy
    shares = re.findall(r"^a step +data (\d+) %, compute (\d+) %, communication (\d+) %", rank_0.out, re.MULTILINE)
    data, compute, communication = map(int, shares[0])
    assert data > 20
    assert communication > 15  # rank 0 waits for rank 1
    assert data + compute + communication <= 101


def test_the_median_of_two_is_the_faster_one() -> None:
    assert compare([0.1, 0.3]) == Skew(
        slowest=1, ratio=pytest.approx(3.0), behind_s=pytest.approx(0.2), speeds=(1.0, pytest.approx(1 / 3))
    )
    assert compare([0.2, 0.1, 0.2, 0.25]).ratio == pytest.approx(1.25)


def test_a_rank_is_named_when_it_is_behind_twice_in_a_row_and_once() -> None:
    judge = Judge()
    slow, other, well = (
        Skew(slowest=rank, ratio=ratio, behind_s=0.1 * (ratio - 1), speeds=())
        for rank, ratio in ((1, 3.0), (2, 2.0), (0, 1.1))
    )
    heard = [
        judge.hear(skew, step=step, now_s=float(step))
        for step, skew in enumerate((slow, well, slow, slow, slow, other, other, well))
    ]
    assert heard == [
        "",
        "",
        "",
        "step 3: rank 1 is slow: a step takes it 3.0 times as long as the others",
        "",
        "",
        "step 6: rank 2 is slow: a step takes it 2.0 times as long as the others",
        "",
    ]
