"""The parts of the estimate of `ddptrain fit`, and its arguments."""

import re

import pytest
import torch
from tests.messages import assert_names
from tests.unit.ddptrain import test_verbs

from ddptrain import memory_estimate
from ddptrain.errors import TrainError
from ddptrain.memory_estimate import GIB, TrainingSize, activation_bytes, estimate_message, suggestions


def test_what_is_saved_for_the_backward_pass() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
        batch = torch.empty(8, 100)
    # The input of each layer; ReLU's output is the second layer's input, and counted once.
    assert activation_bytes(model, batch) == 4 * (8 * 100 + 8 * 50)


def test_half_of_the_moments_are_elsewhere_with_two_ranks() -> None:
    case = TrainingSize(num_parameters=GIB, optimizer="adamw", dtype="fp32", bucket_view=True)
    assert case.total() == (4 + 4 + 8 + 2) * GIB
    ideas = dict(suggestions(case, ranks=2))
    assert ideas["bucket views, and ZeroRedundancyOptimizer on 2 ranks"].total() == (4 + 4 + 4 + 2) * GIB
    assert ideas["FSDP instead of DDP on 2 ranks"].total() == (2 + 2 + 4 + 2) * GIB
    assert_names(estimate_message(case, title="it", memory=18 * GIB, ranks=2).splitlines()[-1], "18.0")


@pytest.mark.parametrize(
    ("text", "value"), [("80GB", 80 * GIB), ("80", 80 * GIB), ("512MiB", GIB / 2), ("1.5 TB", 1536 * GIB)]
)
def test_a_size(text: str, value: float) -> None:
    assert memory_estimate.parse_size(text) == value


@pytest.mark.parametrize(("text", "value"), [("8e9", 8e9), ("8B", 8e9), ("350M", 350e6), ("12", 12.0)])
def test_a_number_of_parameters(text: str, value: float) -> None:
    assert memory_estimate.parse_count(text) == value


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("--params 8e9 --memory much", id="memory"),
        pytest.param("--params 0 --memory 1GB", id="params"),
        pytest.param("--memory 1GB", id="neither"),
    ],
)
def test_wrong_arguments_of_fit_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        memory_estimate.main(arguments.split())
    assert ended.value.code == 2
    assert_names(capsys.readouterr().err, "ddptrain fit --help")


def test_without_a_gpu_the_memory_must_be_given() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TrainError) as error:
        memory_estimate.main(["--params", "8e9"])
    assert error.value.code == 2
    assert_names(error.value, "--memory")


def test_a_model_of_ours_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        memory_estimate.main(["--model", "resnet18", "--image", "3x32x32", "--batch-size", "128", "--memory", "16GB"])
        == 0
    )
    out = capsys.readouterr().out
    first, *table, last = out.splitlines()
    assert "11,173,962" in first
    assert_names(first, "11,173,962", "3x32x32", "16.0")
    assert_names(next(line for line in table if line.startswith("  DDP's buckets ")), "0.0")
    assert_names(
        re.sub(r"\d\.\d GiB", "N GiB", next(line for line in table if line.startswith("  activations "))), "128"
    )
    assert_names(last.partition(":")[0], "16.0")
    plain = ("--dtype", "fp32", "--no-bucket-view", "--memory", "16GB")
    assert memory_estimate.main(["--model", "resnet18", *plain]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == first.replace("amp", "fp32")
    assert_names(next(line for line in out.splitlines() if line.startswith("  DDP's buckets ")), "42.6", "11,173,962")


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        pytest.param("--spawn 1000000", 2, "--spawn", id="spawn-too-many"),
        pytest.param("--spawn 2 --rank 0 --world-size 2", 2, "--spawn", id="spawn-and-rank"),
        pytest.param("export run weights.bin", 2, "--help", id="export-of-an-unknown-format"),
    ],
)
def test_arguments_with_which_nothing_can_start(tmp_path, arguments, code, fact):
    test_verbs.test_arguments_with_which_nothing_can_start(tmp_path, arguments, code, fact)
