"""The command line and the environment: what they mean, and how wrong ones are told."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddptrain.errors import TrainError
from ddptrain.job import global_batch_size
from ddptrain.main import run
from ddptrain.options import parse, shaping
from ddptrain.options.ranks import RankOptions
from ddptrain.place import Place, read_place, usable_cores
from ddptrain.precision import choose_precision, has_cpu_bf16
from ddptrain.strategy import check_strategy
from ddptrain.world import choose_device
from ddpwire.signals import Signals


def test_a_recipe_fills_in_what_was_not_given() -> None:
    options = parse(["--data", "cifar10", "--lr", "0"], {})
    assert (options.model.name, options.training.batch_size, options.optimizer.lr, options.augmentation.augment) == (
        "resnet18",
        128,
        0.0,
        True,
    )


def test_a_flag_goes_before_the_environment() -> None:
    environ = {"DDP_DEVICE": "cuda", "DDP_CHECKPOINT_DIR": "/somewhere"}
    told = parse([], environ)
    assert (told.machine.device, str(told.checkpoints.folder)) == ("cuda", "/somewhere")
    given = parse(["--device", "cpu", "--checkpoint-dir", "here"], environ)
    assert (given.machine.device, str(given.checkpoints.folder)) == ("cpu", "here")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--epochs", "-1"], "argument --epochs: '-1' is not a whole number from 0"),
        (["--lr", "nan"], "argument --lr: 'nan' is not a number from 0"),
        (["--momentum", "1"], "argument --momentum: '1' is not a number from 0 and below 1"),
        (
            ["--synthetic-shape", "3x8x9"],
            "argument --synthetic-shape: '3x8x9' is not CHANNELSxSIZExSIZE, such as 3x32x32",
        ),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3 (did you mean --epochs?)"),
        (["--weigth-decay=1"], "unrecognized arguments: --weigth-decay=1 (did you mean --weight-decay?)"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["photos"], "unrecognized arguments: photos"),
        (
            ["--batch-size", "8", "--batch-size-per-rank", "4"],
            "--batch-size and --batch-size-per-rank say the same thing twice: give one of them",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_from_rank_0(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, err in (("0", f"ddptrain: {told}; see ddptrain --help\n"), ("1", "")):
        with pytest.raises(SystemExit) as left:
            parse(arguments, {"RANK": rank})
        assert left.value.code == 2
        assert capsys.readouterr() == ("", err)


def test_a_wrong_device_in_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([], {"DDP_DEVICE": "tpu"})
    assert capsys.readouterr().err == "ddptrain: DDP_DEVICE='tpu' is not auto, cuda or cpu; see ddptrain --help\n"


def test_the_batch_is_over_all_ranks() -> None:
    assert global_batch_size(parse(["--batch-size", "7"], {}).training, Place(size=7)) == 7
    per_rank = parse(["--batch-size-per-rank", "100"], {})
    assert global_batch_size(per_rank.training, Place(size=3)) == 300
    assert shaping(per_rank, batch_size=300)["batch_size"] == 300
    with pytest.raises(TrainError) as error:
        global_batch_size(parse(["--batch-size", "7"], {}).training, Place(size=8))
    assert (error.value.code, error.value.message) == (
        78,
        "--batch-size 7 is less than one image for each of 8 ranks: give at least 8, or fewer ranks",
    )


def test_what_shapes_a_training_and_what_does_not() -> None:
    shapes = shaping(parse([], {}), batch_size=64)
    assert {"data", "model", "seed", "batch_size", "lr", "augment", "label_smoothing"} <= shapes.keys()
    assert not {"epochs", "device", "deterministic", "keep", "resume", "data_dir"} & shapes.keys()


RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
HINT = "; start ranks with ddprun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"


def by_hand(*arguments: str) -> RankOptions:
    return parse([*arguments], {}).ranks


def test_a_place_by_hand() -> None:
    how = by_hand("--rank=1", "--world-size=4", "--init-method=tcp://10.0.0.1:29500")
    assert read_place({}, how) == Place(rank=1, size=4, local_rank=1, local_size=4)
    same = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_place(same, how) == Place(rank=1, size=4, local_rank=0, local_size=1)
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_place(mpi, by_hand("--backend=mpi")) == Place(rank=3, size=4, local_rank=1, local_size=2)
    assert read_place(mpi) == Place()


@pytest.mark.parametrize(
    ("arguments", "environ", "told"),
    [
        (["--rank=1"], {}, f"WORLD_SIZE is not set, but other variables of a rank are{HINT}"),
        (["--rank=1", "--world-size=2"], {}, f"WORLD_SIZE=2, but MASTER_ADDR is not set{HINT}"),
        (["--rank=1"], RANK | {"RANK": "2"}, "--rank 1, but RANK=2: give one of them"),
        (["--world-size=2"], RANK, "--world-size 2, but WORLD_SIZE=4: give one of them"),
    ],
)
def test_a_place_by_hand_that_is_none(arguments: list[str], environ: dict[str, str], told: str) -> None:
    with pytest.raises(TrainError) as error:
        read_place(environ, by_hand(*arguments))
    assert (error.value.code, error.value.message) == (78, told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--strategy=dp"], "--strategy dp is for one process, this is one of 2 ranks: give ddp"),
        (
            ["--static-graph", "--accumulate=2"],
            "--static-graph does not go with --accumulate: leave one of them out",
        ),
    ],
)
def test_what_does_not_go_together(arguments: list[str], told: str) -> None:
    with pytest.raises(TrainError) as error:
        check_strategy(parse(arguments, {}), Place(size=2))
    assert (error.value.code, error.value.message) == (78, told)


def test_arithmetic_is_chosen_by_the_hardware() -> None:
    cpu = torch.device("cpu")

    def chosen(*arguments: str) -> str:
        return choose_precision(parse([*arguments, "--recipe=synthetic-convnet"], {}).machine, cpu).name

    assert chosen() == ("bf16" if has_cpu_bf16() else "fp32")
    assert chosen("--deterministic") == "fp32"
    assert chosen("--deterministic", "--precision=bf16") == "bf16"
    with pytest.raises(TrainError) as error:
        chosen("--precision=fp16")
    assert (error.value.code, error.value.message) == (
        78,
        "--precision fp16 needs a GPU: give bf16, fp32 or auto",
    )


def test_what_needs_gpus_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def told(*arguments: str) -> tuple[int, str]:
        here = ["--device=cpu", f"--checkpoint-dir={tmp_path}", *arguments]
        return run(parse(here, {}), {}, Signals()), capfd.readouterr().err

    assert told("--sync-bn") == (
        78,
        "ddptrain: --sync-bn needs GPUs: on CPUs, --norm group does not depend on the batch\n",
    )
    assert told("--backend=nccl") == (
        78,
        "ddptrain: --backend nccl needs GPUs, and this trains on the CPU: give auto or gloo\n",
    )


def test_a_place() -> None:
    assert read_place({}) == Place(rank=0, size=1, local_rank=0, local_size=1)
    assert read_place(RANK) == Place(rank=1, size=4, local_rank=1, local_size=4)
    node = {**RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert read_place(node) == Place(rank=1, size=4, local_rank=0, local_size=2)
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}) == Place()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set, but other variables of a rank are"),
        ({"RANK": None}, "RANK is not set, but other variables of a rank are"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number from 0"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
        ({"MASTER_ADDR": None}, "WORLD_SIZE=4, but MASTER_ADDR is not set"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port from 1 to 65535"),
        ({"MASTER_PORT": "tcp://10.0.0.1:80"}, "MASTER_PORT='tcp://10.0.0.1:80' is not a whole number from 0"),
    ],
)
def test_a_place_that_is_none(wrong: dict[str, str | None], told: str) -> None:
    environ = {name: value for name, value in {**RANK, **wrong}.items() if value is not None}
    with pytest.raises(TrainError) as error:
        read_place(environ)
    assert (error.value.code, error.value.message, error.value.rank) == (78, told + HINT, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert choose_device(Place(), "auto").type == "cpu"
    with pytest.raises(TrainError) as error:
        choose_device(Place(), "cuda")
    assert (error.value.code, error.value.message) == (
        78,
        "--device cuda, but torch sees no GPU here; --device auto takes the CPU then",
    )


def test_there_is_a_core_to_use() -> None:
    assert usable_cores() >= 1


def test_help_is_there_without_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ddptrain", "--help"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert ended.stdout.startswith("usage: ddptrain ")
    imported = {line.split("|")[-1].strip().split(".")[0] for line in ended.stderr.splitlines()}
    assert "ddptrain" in imported
    assert not {"torch", "numpy", "torchvision", "prometheus_client", "rich"} & imported
