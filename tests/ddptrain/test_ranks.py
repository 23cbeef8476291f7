"""Whole trainings by real ranks under gloo."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Train = Callable[..., list]
DETERMINISTIC = ("--deterministic", "--epochs", "8")
STEPS_PER_EPOCH = 45


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Fingerprints of trainings that nothing disturbed, by what they were."""
    return {}


def fingerprint(train: Train, undisturbed: dict[str, str]) -> str:
    """Of two ranks that train DETERMINISTIC."""
    if "two ranks" not in undisturbed:
        undisturbed["two ranks"] = train(*DETERMINISTIC, "--checkpoint-dir", "undisturbed", size=2)[0].fingerprint
    return undisturbed["two ranks"]


def test_two_ranks_learn_the_digits_the_same_way_twice(
    train: Train, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    rank_0, rank_1 = train(*DETERMINISTIC, size=2)
    assert (rank_0.code, rank_0.err) == (0, "")
    assert (rank_1.code, rank_1.out, rank_1.err) == (0, "", "")
    lines = rank_0.out.splitlines()
    assert lines[0] == (
        "digitsnet (39,250 parameters) on digits (1,437 images to train, 360 to test): "
        "2 ranks, gloo on cpu, 1 thread a rank, batch 32, 8 epochs of 45 steps; "
        "fp32, 0.1 MB of images on the device"
    )
    assert len(lines) == 1 + 8 + 3 + 5
    assert lines[-5] == "world size     2"
    assert lines[-2] == "checkpoint     checkpoints/step-00000360.pt"
    assert rank_0.right >= 0.98 * 360
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    assert kept[-3:] == ["step-00000270.pt", "step-00000315.pt", "step-00000360.pt"]
    assert len(kept) <= 4  # the best may be an older one
    assert rank_0.fingerprint == fingerprint(train, undisturbed)


def test_evaluation_counts_every_image_once_on_any_number_of_ranks(train: Train) -> None:
    options = ("--data=synthetic", "--synthetic-samples=808", "--synthetic-shape=1x8x8", "--epochs=1", "--lr=0.002")
    ends = [train(*options, size=size)[0] for size in (2, 1, 3)]  # 101 images to test: uneven on 2 and on 3
    assert [end.out.splitlines()[1] for end in ends[1:]] == [
        "resumed from checkpoints/step-00000013.pt: all 13 steps are done, nothing is left to train "
        "(more --epochs go on, another --checkpoint-dir starts anew)"
    ] * 2
    assert len({(end.right, end.fingerprint) for end in ends}) == 1
    assert 15 < ends[0].right < 95  # neither guessing nor all


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process_uneven_batches_included(train: Train, size: int) -> None:
    script = str(Path(__file__).with_name("gradients.py"))
    words = ("64", "29", "2", "1", "64/2", "29/3", "2/4")  # of a batch; over how many parts it is accumulated
    ended = train(*words, size=size, command=(script,))
    expected = "".join(f"{word} equal\n" for word in words)
    assert [(one.code, one.out, one.err) for one in ended] == [(0, expected, "")] * size


def test_killed_in_the_middle_of_an_epoch_it_goes_on_bit_for_bit(
    train: Train, start: Callable, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    options = (*DETERMINISTIC, "--checkpoint-every", "5", "--keep", "0")
    world = start(*options, size=2)
    world.wait_for("epoch  3/8")
    world.kill()
    steps = sorted(int(path.name[5:13]) for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    while steps[-1] % STEPS_PER_EPOCH == 0:  # so that it is in the middle
        (tmp_path / "checkpoints" / f"step-{steps.pop():08d}.pt").unlink()
    newest = steps[-1]
    rank_0, rank_1 = train(*options, size=2)
    assert (rank_0.code, rank_1.code, rank_0.err, rank_1.err) == (0, 0, "", "")
    assert rank_0.out.splitlines()[1] == (
        f"resumed from checkpoints/step-{newest:08d}.pt: going on at step {newest + 1} of 360 "
        f"(epoch {newest // STEPS_PER_EPOCH + 1})"
    )
    assert rank_0.fingerprint == fingerprint(train, undisturbed)


def test_a_signal_to_one_rank_saves_stops_all_and_loses_nothing(
    train: Train, start: Callable, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    world = start(*DETERMINISTIC, size=2)
    world.wait_for("epoch  2/8")
    world.ranks[1].send_signal(signal.SIGTERM)
    rank_0, rank_1 = world.end()
    assert (rank_0.code, rank_0.err, rank_1.code, rank_1.out, rank_1.err) == (143, "", 143, "", "")
    newest = max((tmp_path / "checkpoints").glob("step-*.pt"))
    step = int(newest.name[5:13])
    assert rank_0.out.splitlines()[-1] == (
        f"stopped by SIGTERM to rank 1 after step {step} of 360: saved checkpoints/{newest.name}; "
        "the same command goes on from there"
    )
    again = train(*DETERMINISTIC, size=2)
    assert [one.code for one in again] == [0, 0]
    assert (
        again[0].out.splitlines()[1].startswith(f"resumed from checkpoints/{newest.name}: going on at step {step + 1} ")
    )
    assert again[0].fingerprint == fingerprint(train, undisturbed)


@pytest.mark.parametrize(("number", "code", "name"), [(signal.SIGUSR1, 138, "SIGUSR1"), (signal.SIGINT, 130, "Ctrl-C")])
def test_the_other_signals_save_too(start: Callable, tmp_path: Path, number: int, code: int, name: str) -> None:
    world = start("--epochs", "50")
    world.wait_for("epoch  1/50")
    world.ranks[0].send_signal(number)
    ended = world.end()[0]
    newest = max((tmp_path / "checkpoints").glob("step-*.pt")).name
    assert (ended.code, ended.err) == (code, "")
    assert ended.out.splitlines()[-1] == (
        f"stopped by {name} after step {int(newest[5:13])} of 2250: saved checkpoints/{newest}; "
        "the same command goes on from there"
    )


def test_a_signal_during_start_up_ends_it_at_once(start: Callable) -> None:
    importing, alone = start(), start(size=2)
    listens = re.compile(r"SigCgt:\s*([0-9a-f]+)")
    status = Path(f"/proc/{importing.ranks[0].pid}/status")
    while not int(listens.search(status.read_text())[1], 16) & 1 << signal.SIGUSR1 - 1:  # type: ignore[index]
        time.sleep(0.01)
    importing.ranks[0].send_signal(signal.SIGUSR1)
    assert importing.ranks[0].wait(timeout=20) == 138
    assert importing.ranks[0].communicate() == ("", "")
    alone.ranks[1].kill()  # rank 0 waits for it in C++, where no Python handler runs
    with pytest.raises(subprocess.TimeoutExpired):
        alone.ranks[0].wait(timeout=5)
    alone.ranks[0].send_signal(signal.SIGTERM)
    assert alone.ranks[0].wait(timeout=20) == 143
    assert alone.ranks[0].communicate() == ("", "")


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_asked(start: Callable) -> None:
    world = start("--timeout", "1", size=2)
    world.ranks[1].kill()
    ended = world.ranks[0].communicate(timeout=60)
    assert world.ranks[0].returncode == 142
    assert ended[0] == ""
    assert ended[1].splitlines()[-1].startswith("ddptrain: rank 0 of 2 waited 1 s for the other ranks (--timeout) at ")


def test_an_error_of_every_rank_is_told_by_one(train: Train, tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "sklearn"  # a scikit-learn without the file
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    ended = train(size=2, environ={"PYTHONPATH": f"{tmp_path / 'fake'}"})
    assert [(one.code, one.out) for one in ended] == [(66, "")] * 2
    assert [one.err for one in ended] == [
        "ddptrain: the digits are in scikit-learn's package, which is not installed: pip install 'ddpctl[digits]'\n",
        "",
    ]


def test_a_lost_rank_ends_the_others_in_one_line(start: Callable, tmp_path: Path) -> None:
    world = start("--epochs", "50", size=2)
    world.wait_for("epoch  2/50")
    world.ranks[1].kill()
    rank_0, _ = world.end()
    assert rank_0.code == 142
    assert rank_0.err.startswith("ddptrain: rank 0 lost the other ranks: ")
    assert rank_0.err.count("\n") == 1
    shutil.rmtree(tmp_path / "checkpoints")
