"""Whole trainings by real ranks under gloo."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import forks
from tests.messages import assert_names

Train = Callable[..., list]


DETERMINISTIC = ("--deterministic", "--epochs", "4")


STEPS_PER_EPOCH = 45


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Fingerprints of trainings that nothing disturbed, by what they were."""
    return {}


def fingerprint(train: Train, undisturbed: dict[str, str]) -> str:
    """Of three ranks that train DETERMINISTIC: of two, a + b = b + a hides the order in which gradients are added."""
    if "three ranks" not in undisturbed:
        undisturbed["three ranks"] = train(*DETERMINISTIC, "--checkpoint-dir", "undisturbed", size=3)[0].fingerprint
    return undisturbed["three ranks"]


def test_three_ranks_learn_the_digits_the_same_way_twice(
    train: Train, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    rank_0, *others = train("--deterministic", "--epochs=8", size=3)
    assert (rank_0.code, rank_0.err) == (0, "")
    assert [(other.code, other.out, other.err) for other in others] == [(0, "", "")] * 2
    lines = rank_0.out.splitlines()
    assert_names(lines[0], "39,250", "1,437", "360", "32")
    assert sum(line.startswith("epoch ") for line in lines) == 8  # a busy machine adds lines about stragglers
    assert lines[-5] == "world size     3"
    assert lines[-2] == "checkpoint     checkpoints/step-00000360.pt"
    assert rank_0.right >= 0.98 * 360
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    assert kept[-3:] == ["step-00000270.pt", "step-00000315.pt", "step-00000360.pt"]
    assert len(kept) <= 4  # the best may be an older one
    again = train(*DETERMINISTIC, "--checkpoint-dir", "again", size=3)
    assert again[0].fingerprint == fingerprint(train, undisturbed)


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_one_process_uneven_batches_included(train: Train, size: int) -> None:
    script = str(Path(__file__).with_name("gradients.py"))
    arguments = ("64", "29", "2", "1", "64/2", "29/3", "2/4")  # of a batch; over how many parts it is accumulated
    arguments += (f"64@3{':1' * (size - 1)}", f"29/3@{'1:' * (size - 1)}9", f"2/4@9{':1' * (size - 1)}")
    ended = train(*arguments, size=size, command=(script,))
    expected = "".join(f"{word} equal\n" for word in arguments)
    assert [(rank.code, rank.out, rank.err) for rank in ended] == [(0, expected, "")] * size


def test_killed_in_the_middle_of_an_epoch_it_goes_on_bit_for_bit(
    train: Train, start: Callable, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    options = (*DETERMINISTIC, "--checkpoint-every", "5", "--keep", "0")
    world = start(*options, size=3)
    world.wait_for("epoch  1/4")
    world.kill()
    steps = sorted(int(path.name[5:13]) for path in (tmp_path / "checkpoints").glob("step-*.pt"))
    while steps[-1] % STEPS_PER_EPOCH == 0:  # so that it is in the middle
        (tmp_path / "checkpoints" / f"step-{steps.pop():08d}.pt").unlink()
    newest = steps[-1]
    rank_0, *others = train(*options, size=3)
    assert [(process.code, process.err) for process in (rank_0, *others)] == [(0, "")] * 3
    epoch = newest // STEPS_PER_EPOCH + 1
    assert_names(rank_0.out.splitlines()[1], f"checkpoints/step-{newest:08d}.pt", newest + 1, "180", epoch)
    assert rank_0.fingerprint == fingerprint(train, undisturbed)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGINT, 130)], ids=["usr1", "int"])
def test_the_other_signals_save_too(start: Callable, tmp_path: Path, number: int, code: int) -> None:
    world = start("--epochs", "50")
    world.wait_for("epoch  1/50")
    world.ranks[0].send_signal(number)
    ended = world.end()[0]
    newest = max((tmp_path / "checkpoints").glob("step-*.pt")).name
    assert (ended.code, ended.err) == (code, "")
    assert_names(ended.out.splitlines()[-1], int(newest[5:13]), "2250", newest)


def test_a_signal_during_start_up_ends_it_at_once(start: Callable) -> None:
    importing, alone = start(executed=True), start(size=2)
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
    assert_names(ended[1].splitlines()[-1].partition(" at ")[0], "rank 0", "2", "1", "--timeout")


def test_an_error_of_every_rank_is_reported_by_one(train: Train, tmp_path: Path) -> None:
    fake = tmp_path / "sklearn"  # in the current folder: a scikit-learn without the file
    fake.mkdir()
    (fake / "__init__.py").touch()
    ended = train(size=2)
    assert [(rank.code, rank.out) for rank in ended] == [(66, "")] * 2
    assert ended[1].err == ""
    assert_names(ended[0].err, "scikit-learn")


def test_a_lost_rank_ends_the_others_in_one_line(start: Callable, tmp_path: Path) -> None:
    world = start("--epochs", "50", size=2)
    world.wait_for("epoch  2/50")
    world.ranks[1].kill()
    rank_0, _ = world.end()
    assert rank_0.code == 142
    assert rank_0.err.count("\n") == 1
    assert_names(": ".join(rank_0.err.split(": ")[:2]), "rank 0")
    shutil.rmtree(tmp_path / "checkpoints")


MIXED = """
import runpy, sys
import torch
from ddptrain import distributed, training_state

rank = int(distributed.os.environ["RANK"])
if sys.argv.pop(1) == "gpu":
    torch.cuda.set_device = lambda _: None
    distributed.take_device = lambda *_: torch.device("cuda", 0) if rank == 0 else torch.device("cpu")
else:
    training_state.fastest_precision = lambda _: "bf16" if rank == 0 else "fp32"
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
"""


def test_a_rank_without_a_gpu_among_others_is_refused_by_all(train: Train) -> None:
    rank_0, rank_1 = train("gpu", "--timeout=20", size=2, command=("-c", MIXED))
    assert [(process.code, process.out) for process in (rank_0, rank_1)] == [(78, "")] * 2
    assert rank_1.err == ""
    assert_names(rank_0.err, "rank 1", "rank 0", "--device")


def test_ranks_of_different_machines_compute_in_the_same_precision(train: Train) -> None:
    rank_0, rank_1 = train("precision", "--precision=auto", "--epochs=1", size=2, command=("-c", MIXED))
    assert (rank_0.code, rank_1.code, rank_1.err) == (0, 0, "")
    assert "; fp32, " in rank_0.out.splitlines()[0]
    assert_names(rank_0.err, "rank 1", "--precision")


SEND = """
import os, sys, torch, torch.distributed as dist
from ddptrain.distributed import RankInfo, broadcast_state
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
kinds = (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
state = {
    "kinds": {kind: torch.arange(6).to(kind).reshape(2, 3) for kind in kinds},
    "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "turned": torch.arange(6.0).reshape(2, 3).T,
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "with gaps": torch.arange(12.0).reshape(3, 4)[:, ::2], "a part": torch.arange(12.0)[5:],
    "plain": [1, "two", (3.0, None)],
}
got = broadcast_state(RankInfo(rank=rank, size=2), state if rank == 0 else None)
for one, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(state), strict=True):
    assert (torch.equal(one, other) and one.dtype == other.dtype) if isinstance(one, torch.Tensor) else one == other
assert [got[name].stride() for name in ("turned", "channels last")] == [(1, 3), (60, 1, 15, 3)]
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that ends by itself
"""


SUM = """
import os, sys, torch, torch.distributed as dist
from ddptrain.distributed import RankInfo, sum_over_ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
matrix = torch.arange(8.0).reshape(4, 2)
assert sum_over_ranks(RankInfo(rank=rank, size=2), matrix[:, 0]).tolist() == [0, 4, 8, 12]
assert torch.equal(matrix, torch.arange(8.0).reshape(4, 2))
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("text", [SEND, SUM], ids=["a state arrives as it was", "a column is summed"])
def test_tensors_with_strides_are_exchanged(text: str, tmp_path: Path) -> None:
    arguments = [["-c", text, str(rank), str(tmp_path / "store")] for rank in (0, 1)]
    ranks = [forks.start(command, env=os.environ, stderr=subprocess.PIPE) for command in arguments]
    assert [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks] == [(b"", 0)] * 2


def test_ranks_that_only_evaluate_have_the_mean_of_their_weights(train: Train, tmp_path: Path) -> None:
    options = (
        *("--data=synthetic", "--synthetic-samples=96", "--synthetic-shape=1x16x16", "--batch-size=16", "--lr=0.1"),
        *("--model=convnet", "--deterministic", "--checkpoint-every=3", "--keep=0", "--allow-changed-config"),
    )
    train(*options, "--communication=localsgd:4", "--epochs=1", size=2)
    for path in (tmp_path / "checkpoints").glob("step-00000006.*"):
        path.unlink()
    evaluated = [
        train(*options, f"--communication={way}", "--epochs=0", size=2)[0].out.splitlines()[-2:]
        for way in ("localsgd:4", "plain")
    ]
    assert evaluated[0] == evaluated[1]
