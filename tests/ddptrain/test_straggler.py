"""The rank that the others wait for is named, and no other ever."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ddptrain.straggler import Judge, Naming, Skew, compare

HOST = re.escape(socket.gethostname())
PACED = """
import os, runpy, sys, time
from ddptrain.input.batches import Preparation

batch, steps = Preparation.batch, 0

def paced(preparation, indices_B, **how):
    # Every rank takes 70 ms, and rank 1 three times as long from step 46 on.
    global steps
    steps += 1
    time.sleep(0.21 if os.environ["RANK"] == "1" and steps > 45 else 0.07)
    return batch(preparation, indices_B, **how)

Preparation.batch = paced
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


@pytest.mark.parametrize(("size", "step_s"), [(2, 0.1), (3, 0.1), (2, 0.02)])
def test_named_within_20_steps_five_of_five_and_nobody_in_1000_healthy_ones(
    train: Callable[..., list], size: int, step_s: float
) -> None:
    command = (str(Path(__file__).with_name("straggling.py")), str(step_s))
    ended = train(size=size, command=command, environ={"NODE_RANK": "3"})
    assert [(one.code, one.err) for one in ended] == [(0, "")] * size
    lines = ended[0].out.splitlines()
    assert len(lines) == 10
    for spell, (slow, again) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        begins = 1000 + 101 * spell
        said = re.fullmatch(
            rf"step (\d+): rank 1 on node 3 \({HOST}\) is slow: a step takes it (\d\.\d) times as long as the others",
            slow,
        )
        assert said, slow
        assert begins < int(said[1]) <= begins + 20
        assert 2 < float(said[2]) < 4.5
        recovered = re.fullmatch(rf"step (\d+): rank 1 on node 3 \({HOST}\) is as fast as the others again", again)
        assert recovered, again
        assert begins + 50 < int(recovered[1]) <= begins + 50 + (30 if step_s > 0.05 else 50)


def test_a_training_names_its_slow_rank(train: Callable[..., list]) -> None:
    rank_0, rank_1 = train("--epochs", "2", size=2, command=("-c", PACED))
    assert (rank_0.code, rank_0.err, rank_1.out, rank_1.err) == (0, "", "", "")
    slow = r"^step (\d+): (rank \d on \S+ is slow): a step takes it \d+\.\d times"
    said = re.findall(slow, rank_0.out, re.MULTILINE)
    assert [what for _, what in said] == [f"rank 1 on {socket.gethostname()} is slow"]
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
        judge.hear(skew, began_s=now_s, now_s=now_s + 0.4)
        for now_s, skew in enumerate((slow, well, slow, slow, slow, other, other, well, well))
    ]
    assert heard == [
        None,
        None,
        None,
        Naming(rank=1, ratio=3.0),
        None,
        None,
        Naming(rank=2, ratio=2.0),
        None,
        Naming(rank=2),
    ]


def test_short_steps_are_judged_by_the_half_second_that_they_make() -> None:
    judge = Judge()
    slow = Skew(slowest=1, ratio=3.0, behind_s=0.02, speeds=())
    heard = [judge.hear(slow, began_s=0.15 * number, now_s=0.15 * number + 0.3) for number in range(4)]
    assert heard == [None, None, Naming(rank=1, ratio=3.0), None]
