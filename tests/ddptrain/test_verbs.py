"""What ddptrain does besides training."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddptrain.checkpoint import Checkpoint, load, write
from ddptrain.errors import TrainError
from ddptrain.verbs import export, fit
from ddptrain.verbs.activations import saved_bytes
from ddptrain.verbs.need import GIB, Case, helps, told


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step, accuracy in ((4, 0.9), (8, 0.8), (9, None)):
        parts = {"model": {"weight": torch.full((3, 2), float(step))}, "optimizer": {}}
        write(folder / f"step-{step:08d}.pt", Checkpoint(step=step, shaping={}, parts=parts, accuracy=accuracy))
    return folder


def exported(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert export.main(arguments.split()) == 0
    return capsys.readouterr().out


def test_the_newest_and_the_best_and_a_named_one(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = exported("run weights.pt", capsys)
    assert told == "weights.pt: 1 tensors of model after step 9, from run/checkpoints/step-00000009.pt\n"
    assert torch.equal(torch.load("weights.pt", weights_only=True)["weight"], torch.full((3, 2), 9.0))
    assert exported("run/checkpoints --best best.pt", capsys) == (
        "best.pt: 1 tensors of model after step 4, test accuracy 90.00 %, from run/checkpoints/step-00000004.pt\n"
    )
    exported("run/checkpoints/step-00000008.pt eight.pt", capsys)
    assert torch.load("eight.pt", weights_only=True)["weight"][0, 0] == 8


def test_averaged_weights_are_taken_where_there_are_any(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = load(checkpoints / "step-00000009.pt")
    parts = {**newest.parts, "ema": {"weight": torch.zeros(3, 2)}}
    write(checkpoints / "step-00000009.pt", Checkpoint(step=9, shaping={}, parts=parts, accuracy=0.7))
    assert exported("run weights.pt", capsys).startswith(
        "weights.pt: 1 tensors of ema after step 9, test accuracy 70.00 %, from "
    )
    assert exported("run weights.pt --part model", capsys).startswith(  # it was the averaged ones that were tested
        "weights.pt: 1 tensors of model after step 9, from "
    )


def test_a_resumed_run_s_folder_says_where_its_checkpoints_are(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints.parent.parent / "run-2" / "checkpoints").mkdir(parents=True)
    Path("run-2/run.json").write_text(json.dumps({"checkpoint_dir": str(checkpoints)}))
    assert exported("run-2 weights.pt", capsys).endswith(f"after step 9, from {checkpoints}/step-00000009.pt\n")


def test_weights_to_start_from_are_looked_for_before_anything_is_trained(checkpoints: Path) -> None:
    command = [sys.executable, "-m", "ddptrain", "--model", "resnet18", "--pretrained", "no.pth"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        66,
        "",
        "ddptrain: --pretrained no.pth is not there; leave the name out to download weights\n",
    )


def test_a_training_goes_on_when_nobody_reads_any_more(checkpoints: Path) -> None:
    command = [sys.executable, "-m", "ddptrain", "--epochs", "1", "--device", "cpu", "--checkpoint-dir", "unread"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        training.stdout.close()
        assert (training.stderr.read(), training.wait(120)) == ("", 0)
    assert load(max(Path("unread").glob("step-*.pt"))).step == 45


def test_safetensors_holds_the_same(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    exported("run weights.safetensors", capsys)
    assert torch.equal(safetensors.load_file("weights.safetensors")["weight"], torch.full((3, 2), 9.0))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("nothing w.pt", 66, "nothing: there is no such file or folder"),
        ("empty w.pt", 66, "empty holds no checkpoint (step-*.pt)"),
        ("torn w.pt", 65, "torn/step-00000001.pt: its manifest step-00000001.json is missing"),
        ("run nowhere/w.pt", 73, "nowhere/w.pt cannot be written: No such file or directory"),
        ("run w.pt --part ema", 78, "run/checkpoints/step-00000009.pt has no part 'ema': it has model, optimizer"),
    ],
)
def test_what_cannot_be_exported(checkpoints: Path, arguments: str, code: int, message: str) -> None:
    Path("empty").mkdir()
    Path("torn").mkdir()
    Path("torn/step-00000001.pt").write_bytes(b"torn")
    with pytest.raises(TrainError) as error:
        export.main(arguments.split())
    assert (error.value.code, error.value.message) == (code, message)


def test_a_wrong_name_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddptrain", "export", "run", "weights.bin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (
        2,
        "",
        "ddptrain export: weights.bin is neither .pt nor .safetensors; see ddptrain export --help\n",
    )


def test_eight_billion_parameters_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--params", "8e9", "--optimizer", "adamw", "--dtype", "fp32", "--memory", "80GB"]) == 78
    assert (
        capsys.readouterr().out
        == """\
8,000,000,000 parameters, adamw, fp32, DistributedDataParallel, on a GPU of 80.0 GiB

  parameters         29.8 GiB   8,000,000,000 x 4 bytes
  gradients          29.8 GiB   8,000,000,000 x 4 bytes
  optimizer          59.6 GiB   8,000,000,000 x 8 bytes: 2 for each parameter (adamw)
  DDP's buckets      29.8 GiB   8,000,000,000 x 4 bytes: a second copy of the gradients
  activations               ?   not known without --model and --batch-size
  libraries           2.0 GiB   CUDA, cuBLAS, cuDNN, NCCL: an estimate
  together          151.0 GiB

it does not fit: 151.0 GiB and the activations of 80.0 GiB

What would help:
    121.2 GiB  too much still  gradients as views of DDP's buckets (gradient_as_bucket_view)
     76.5 GiB  fits            bucket views, and an 8-bit AdamW (bitsandbytes, torchao)
     61.6 GiB  fits            bucket views, and weights, gradients and moments in bf16
     69.1 GiB  fits            bucket views, and ZeroRedundancyOptimizer on 8 ranks
     16.9 GiB  fits            FSDP instead of DDP on 8 ranks
"""
    )


def test_a_model_of_ours_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert fit.main(["--model", "resnet18", "--image", "3x32x32", "--batch-size", "128", "--memory", "16GB"]) == 0
    out = capsys.readouterr().out
    first = "resnet18 (11,173,962 parameters) on 3x32x32, sgd, amp, DistributedDataParallel, on a GPU of 16.0 GiB"
    assert out.splitlines()[0] == first
    assert re.search(r"^  activations +\d\.\d GiB   what the backward pass needs of a batch of 128$", out, re.MULTILINE)
    assert re.search(r"^  DDP's buckets +0.0 MiB   none: gradients are views of them$", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("it fits: ")
    plain = ("--dtype", "fp32", "--no-bucket-view", "--memory", "16GB")
    assert fit.main(["--model", "resnet18", *plain]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == first.replace("amp", "fp32")
    assert "11,173,962 x 4 bytes: a second copy of the gradients" in out


def test_what_is_saved_for_the_backward_pass() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.ReLU(), torch.nn.Linear(50, 10))
        batch = torch.empty(8, 100)
    # The input of each layer; ReLU's output is the second layer's input, and counted once.
    assert saved_bytes(model, batch) == 4 * (8 * 100 + 8 * 50)


def test_half_of_the_moments_are_elsewhere_with_two_ranks() -> None:
    case = Case(num_parameters=GIB, optimizer="adamw", dtype="fp32", bucket_view=True)
    assert case.total() == (4 + 4 + 8 + 2) * GIB
    ideas = dict(helps(case, ranks=2))
    assert ideas["bucket views, and ZeroRedundancyOptimizer on 2 ranks"].total() == (4 + 4 + 4 + 2) * GIB
    assert ideas["FSDP instead of DDP on 2 ranks"].total() == (2 + 2 + 4 + 2) * GIB
    assert told(case, title="it", memory=18 * GIB, ranks=2).endswith(
        "it fits: 18.0 GiB and the activations of 18.0 GiB"
    )


@pytest.mark.parametrize(
    ("text", "value"), [("80GB", 80 * GIB), ("80", 80 * GIB), ("512MiB", GIB / 2), ("1.5 TB", 1536 * GIB)]
)
def test_a_size(text: str, value: float) -> None:
    assert fit.size(text) == value


@pytest.mark.parametrize(("text", "value"), [("8e9", 8e9), ("8B", 8e9), ("350M", 350e6), ("12", 12.0)])
def test_a_number_of_parameters(text: str, value: float) -> None:
    assert fit.number(text) == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--params 8e9 --memory much", "argument --memory: 'much' is not a size such as 80GB"),
        ("--params 0 --memory 1GB", "argument --params: '0' is not a number of parameters such as 8e9 or 8B"),
        ("--memory 1GB", "give --params or --model"),
    ],
)
def test_what_makes_no_sense(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        fit.main(arguments.split())
    assert (left.value.code, capsys.readouterr().err) == (2, f"ddptrain fit: {message}; see ddptrain fit --help\n")


def test_a_machine_without_a_gpu_is_asked_for_the_size() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(TrainError) as error:
        fit.main(["--params", "8e9"])
    assert (error.value.code, error.value.message) == (
        2,
        "there is no GPU here to ask: give --memory, such as --memory 80GB",
    )


def test_what_the_docs_show(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/checkpoints.md").read_text()
    lines = [
        line.partition("#")[0].split() for line in re.findall(r"^ddptrain ((?:export|fit) .*)$", page, re.MULTILINE)
    ]
    codes = {}
    for verb, *arguments in lines:
        words = [str(checkpoints) if word == "checkpoints" else word for word in arguments]
        codes[verb, *arguments] = {"export": export, "fit": fit}[verb].main(words)
    assert sorted(codes.values()) == [0, 0, 0, 78]
    state = torch.load(checkpoints / "step-00000009.pt", weights_only=True)["parts"]["model"]
    assert state["weight"].shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("--seed 99999999999999999999", 2, "argument --seed: '99999999999999999999' is not a whole number from 0 to "
         "9223372036854775807; see ddptrain --help"),
        ("--spawn 1000000", 2, "argument --spawn: '1000000' is not a whole number from 1 to 1024; see ddptrain --help"),
        ("--spawn 2 --rank 0 --world-size 2", 2,
         "--spawn starts its ranks by itself: leave out --rank; see ddptrain --help"),
        ("--rank 0 --world-size 2 --init-method file:///nodir/x", 66,
         "--init-method file:///nodir/x: there is no folder /nodir"),
    ],
)  # fmt: skip
def test_what_no_training_can_start_with(tmp_path: Path, arguments: str, code: int, told: str) -> None:
    command = [sys.executable, "-m", "ddptrain", *arguments.split(), "--checkpoint-dir", str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"ddptrain: {told}\n")
