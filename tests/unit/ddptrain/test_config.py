"""The command line and the environment: what they mean, how wrong ones are refused, and those that the docs show."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names, refused

from ddprank.signals import Signals
from ddptrain import compat
from ddptrain.config import RankOptions, parse_options, shaping_options
from ddptrain.distributed import RankInfo, check_strategy, read_rank_info, take_device
from ddptrain.errors import TrainError
from ddptrain.main import run
from ddptrain.recipes import recipe_names
from ddptrain.training_state import choose_precision, global_batch_size, lowest_precision


def test_a_recipe_fills_in_what_was_not_given() -> None:
    options = parse_options(["--data", "cifar10", "--lr", "0"], {})
    assert (options.model.name, options.training.batch_size, options.optimizer.lr, options.augmentation.augment) == (
        "resnet18",
        128,
        0.0,
        True,
    )


def test_a_flag_goes_before_the_environment() -> None:
    environ = {"DDP_DEVICE": "cuda", "DDP_CHECKPOINT_DIR": "/somewhere"}
    by_environment = parse_options([], environ)
    assert (by_environment.machine.device, str(by_environment.checkpoints.folder)) == ("cuda", "/somewhere")
    given = parse_options(["--device", "cpu", "--checkpoint-dir", "here"], environ)
    assert (given.machine.device, str(given.checkpoints.folder)) == ("cpu", "here")


@pytest.mark.parametrize(
    ("arguments", "environ", "facts"),
    [
        pytest.param(["--epochs", "-1"], {}, ["--epochs"], id="epochs-negative"),
        pytest.param(["--lr", "nan"], {}, ["--lr"], id="lr-nan"),
        pytest.param(["--synthetic-shape", "3x8x9"], {}, ["--synthetic-shape"], id="shape-not-square"),
        pytest.param(["--epoch", "3"], {}, ["--epoch"], id="misspelt"),
        pytest.param(["--batch-size=8", "--batch-size-per-rank=4"], {}, ["--batch-size"], id="batch-size-twice"),
        pytest.param([], {"DDP_DEVICE": "tpu"}, ["DDP_DEVICE", "tpu"], id="device-of-the-environment"),
    ],
)
def test_a_wrong_command_line_is_one_line_from_rank_0(
    arguments: list[str], environ: dict[str, str], facts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, num_lines in (("0", 1), ("1", 0)):
        with refused(SystemExit, code=2):
            parse_options(arguments, {**environ, "RANK": rank})
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", num_lines)
        if rank == "0":
            assert_names(err, *facts, "ddptrain --help")


def test_the_batch_is_over_all_ranks() -> None:
    assert global_batch_size(parse_options(["--batch-size", "7"], {}).training, RankInfo(size=7)) == 7
    per_rank = parse_options(["--batch-size-per-rank", "100"], {})
    assert global_batch_size(per_rank.training, RankInfo(size=3)) == 300
    assert shaping_options(per_rank, batch_size=300)["batch_size"] == 300
    with refused(TrainError, "--batch-size", "7", "8", code=78):
        global_batch_size(parse_options(["--batch-size", "7"], {}).training, RankInfo(size=8))


def test_what_shapes_a_training_and_what_does_not() -> None:
    shapes = shaping_options(parse_options([], {}), batch_size=64)
    assert {"data", "model", "seed", "batch_size", "lr", "augment", "label_smoothing", "deterministic"} <= shapes.keys()
    assert not {"epochs", "device", "precision", "keep", "resume", "data_dir"} & shapes.keys()
    exact = shaping_options(parse_options(["--deterministic"], {}), batch_size=64)
    assert exact.keys() - shapes.keys() == {
        "precision", "channels_last", "compile", "bucket_mb", "strategy", "balance",
    }  # fmt: skip


RANK = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def by_hand(*arguments: str) -> RankOptions:
    return parse_options([*arguments], {}).ranks


@pytest.mark.parametrize(
    ("arguments", "environ", "missing"),
    [
        pytest.param(["--rank=1"], {}, ["WORLD_SIZE"], id="no-world-size"),
        pytest.param(["--rank=1", "--world-size=2"], {}, ["MASTER_ADDR"], id="no-master"),
        pytest.param(["--rank=1"], RANK | {"RANK": "2"}, ["RANK", "1", "2"], id="other-rank"),
        pytest.param(["--world-size=2"], RANK, ["WORLD_SIZE", "2", "4"], id="other-world-size"),
    ],
)
def test_wrong_rank_options_are_refused(arguments: list[str], environ: dict[str, str], missing: list[str]) -> None:
    with refused(TrainError, *missing, code=78):
        read_rank_info(environ, by_hand(*arguments))


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        pytest.param(["--strategy=dp"], 2, id="dp-of-two-ranks"),
        pytest.param(["--strategy=dp", "--recompute"], 1, id="dp-recompute"),
        pytest.param(["--compile=default", "--bucket-mb=0.5"], 2, id="compile"),
        pytest.param(["--compile=reduce-overhead", "--accumulate=2"], 2, id="cuda-graphs"),
        pytest.param(["--communication=auto", "--deterministic"], 2, id="auto-would-measure"),
        pytest.param(["--strategy=fsdp", "--communication=powersgd:1"], 2, id="sharded-powersgd"),
    ],
)
def test_options_that_exclude_each_other(arguments: list[str], size: int) -> None:
    with pytest.raises(TrainError) as error:
        check_strategy(parse_options(arguments, {}), RankInfo(size=size))
    assert (error.value.code, error.value.rank) == (78, None)
    assert_names(error.value, *(argument.partition("=")[0] for argument in arguments))
    for allowed in (["--strategy=dp"], ["--recompute"], ["--compile=default", "--accumulate=2"]):
        check_strategy(parse_options(allowed, {}), RankInfo())


@pytest.mark.parametrize("way", ["localsgd:4", "diloco:4", "auto"])
def test_a_single_rank_exchanges_nothing_so_every_way_is_accepted(way: str) -> None:
    arguments = [f"--communication={way}", "--ema=0.9", "--balance=auto", "--deterministic"]
    check_strategy(parse_options(arguments, {}), RankInfo())
    with refused(TrainError, "--communication", way, code=78):
        check_strategy(parse_options(arguments, {}), RankInfo(size=2))


def test_a_way_of_communication() -> None:
    ways = {"": "plain", "--compress=bf16": "bf16", "--compress=none": "plain",
            "--communication=powersgd:04": "powersgd:4", "--communication=auto": "auto"}  # fmt: skip
    assert {text: parse_options(text.split(), {}).ranks.communication for text in ways} == ways


def test_the_old_and_the_new_name_of_an_option_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with refused(SystemExit, code=2):
        parse_options(["--communication=bf16", "--compress=fp16"], {})
    (line,) = capsys.readouterr().err.splitlines()
    assert_names(line, "--communication", "--compress")


@pytest.mark.parametrize("text", ["powersgd", "powersgd:0", "bf16:2", "diloco:", "diloco:-3", "localsgd:x", "zip", ""])
def test_an_unknown_way_of_communication(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with refused(SystemExit, code=2):
        parse_options([f"--communication={text}"], {})
    assert_names(capsys.readouterr().err, "--communication", "powersgd:RANK", "at least 1")


def test_precision_is_chosen_by_the_hardware() -> None:
    cpu = torch.device("cpu")

    def chosen(*arguments: str) -> str:
        return choose_precision(parse_options([*arguments, "--recipe=synthetic-convnet"], {}).machine, cpu).name

    assert chosen() == ("bf16" if compat.has_cpu_bf16() else "fp32")
    assert chosen("--deterministic") == "fp32"
    assert chosen("--deterministic", "--precision=bf16") == "bf16"
    with refused(TrainError, "--precision", code=78):
        chosen("--precision=fp16")
    assert lowest_precision(["bf16", "fp16", "bf16"]) == "fp16"  # an A100 and a T4
    assert lowest_precision(["bf16", "fp32"]) == "fp32"  # CPUs with and without instructions for bf16
    assert lowest_precision(["bf16", "bf16"]) == "bf16"


@pytest.mark.parametrize("option", ["--sync-bn", "--backend=nccl"])
def test_an_option_that_needs_gpus_is_refused(option: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(parse_options(["--device=cpu", f"--checkpoint-dir={tmp_path}", option], {}), {}, Signals()) == 78
    assert_names(capfd.readouterr().err, option.partition("=")[0])


def test_a_place_by_hand() -> None:
    assert read_rank_info({}) == RankInfo(rank=0, size=1, local_rank=0, local_world_size=1)
    assert read_rank_info(RANK) == RankInfo(rank=1, size=4, local_rank=1, local_world_size=4)
    node = {**RANK, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    assert read_rank_info(node) == RankInfo(rank=1, size=4, local_rank=0, local_world_size=2)
    assert read_rank_info({"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo()
    how = by_hand("--rank=1", "--world-size=4", "--init-method=tcp://10.0.0.1:29500")
    assert read_rank_info({}, how) == RankInfo(rank=1, size=4, local_rank=1, local_world_size=4)
    same = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert read_rank_info(same, how) == RankInfo(rank=1, size=4, local_rank=0, local_world_size=1)
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert read_rank_info(mpi, by_hand("--backend=mpi")) == RankInfo(rank=3, size=4, local_rank=1, local_world_size=2)
    assert read_rank_info(mpi) == RankInfo()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert take_device(RankInfo(), "auto").type == "cpu"
    with refused(TrainError, "--device", code=78):
        take_device(RankInfo(), "cuda")


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


ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def shown() -> list[str]:
    """Lines of code blocks, and code in tables and prose, that begin with ddptrain; without comments."""
    commands = set()
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"^```\n(.*?)^```", text, re.M | re.S)
        lines = [*(line for block in blocks for line in block.splitlines()), *re.findall(r"`(ddptrain [^`]*)`", text)]
        commands |= {re.sub(r"\s+#.*", "", line) for line in lines if re.match(r"ddptrain( +-| *$| +#)", line)}
    return sorted(commands)


@pytest.mark.parametrize("line", [line for line in shown() if "--help" not in line])
def test_a_shown_command_is_taken(line: str) -> None:
    parse_options([word.replace("FILE.yaml", recipe_names()[0]) for word in shlex.split(line)[1:]], {})


def test_the_docs_show_commands_every_recipe_and_what_a_recipe_must_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(shown()) > 5
    page = (ROOT / "docs" / "training.md").read_text()
    assert [name for name in recipe_names() if f"`{name}`" not in page] == []
    (tmp_path / "own.yaml").write_text("options: {}\n")
    with pytest.raises(SystemExit):
        parse_options([f"--recipe={tmp_path}/own.yaml"], {})
    refused = re.findall(r"--([a-z-]+)(?=[,;])", capsys.readouterr().err)
    documented = re.findall(r"Four options have no default: ([^.]*)\.", page)[0]
    assert sorted(re.findall(r"`([a-z-]+)`", documented)) == sorted(refused) == ["batch-size", "epochs", "lr", "model"]
