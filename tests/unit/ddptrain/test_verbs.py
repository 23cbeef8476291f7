"""What ddptrain does besides training."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.messages import assert_names, refused

from ddptrain import export, memory_estimate
from ddptrain.checkpoint import Checkpoint, load_checkpoint, write_checkpoint
from ddptrain.errors import TrainError


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for step, accuracy in ((4, 0.9), (8, 0.8), (9, None)):
        parts = {"model": {"weight": torch.full((3, 2), float(step))}, "optimizer": {}}
        write_checkpoint(
            folder / f"step-{step:08d}.pt", Checkpoint(step=step, shaping={}, parts=parts, accuracy=accuracy)
        )
    return folder


def exported(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert export.main(arguments.split()) == 0
    return capsys.readouterr().out


def test_the_newest_and_the_best_and_a_named_one(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_names(exported("run weights.pt", capsys), "weights.pt", "1", "model", "run/checkpoints/step-00000009.pt")
    assert torch.equal(torch.load("weights.pt", weights_only=True)["weight"], torch.full((3, 2), 9.0))
    assert_names(
        exported("run/checkpoints --best best.pt", capsys),
        "best.pt",
        "1",
        "model",
        "90.00",
        "run/checkpoints/step-00000004.pt",
    )
    assert torch.load("best.pt", weights_only=True)["weight"][0, 0] == 4
    exported("run/checkpoints/step-00000008.pt eight.pt", capsys)
    assert torch.load("eight.pt", weights_only=True)["weight"][0, 0] == 8


def test_averaged_weights_are_taken_where_there_are_any(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = load_checkpoint(checkpoints / "step-00000009.pt")
    parts = {**newest.parts, "ema": {"weight": torch.zeros(3, 2)}}
    write_checkpoint(checkpoints / "step-00000009.pt", Checkpoint(step=9, shaping={}, parts=parts, accuracy=0.7))
    assert_names(
        exported("run weights.pt", capsys), "weights.pt", "1", "ema", "70.00", "run/checkpoints/step-00000009.pt"
    )
    assert torch.load("weights.pt", weights_only=True)["weight"][0, 0] == 0
    assert_names(
        exported("run weights.pt --part model", capsys), "weights.pt", "1", "model", "run/checkpoints/step-00000009.pt"
    )
    assert torch.load("weights.pt", weights_only=True)["weight"][0, 0] == 9


def test_the_one_before_a_damaged_one_is_taken_with_a_warning(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step, kind, best, taken in ((9, ".pt", "", 8), (4, ".pt", "--best ", 8), (8, ".json", "", 4)):
        checkpoints.joinpath(f"step-{step:08d}{kind}").write_bytes(b"torn")
        if taken == 4:
            with refused(TrainError, "run/checkpoints/step-00000009.pt", code=65):
                export.main(["run", "weights.pt"])
            continue
        assert export.main(f"run {best}weights.pt".split()) == 0
        assert_names(capsys.readouterr().err, f"run/checkpoints/step-{step:08d}.pt")
        assert torch.load("weights.pt", weights_only=True)["weight"][0, 0] == taken
    assert not list(checkpoints.glob("*.bad"))  # a training may be writing here


def test_a_resumed_run_s_folder_says_where_its_checkpoints_are(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoints.parent.parent / "run-2" / "checkpoints").mkdir(parents=True)
    Path("run-2/run.json").write_text(json.dumps({"checkpoint_dir": str(checkpoints)}))
    assert f" {checkpoints}/step-00000009.pt\n" in exported("run-2 weights.pt", capsys)


def test_a_training_goes_on_when_its_stdout_is_closed(checkpoints: Path) -> None:
    options = (
        "--device=cpu --data=synthetic --synthetic-samples=64 --synthetic-shape=1x8x8 --model=simple --batch-size=16"
    )
    command = [sys.executable, "-m", "ddptrain", *options.split(), "--epochs=1", "--checkpoint-dir=unread"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        assert training.stderr is not None
        training.stdout.close()
        assert (training.stderr.read(), training.wait(120)) == ("", 0)
    assert load_checkpoint(max(Path("unread").glob("step-*.pt"))).step == 4


def test_safetensors_holds_the_same(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    exported("run weights.safetensors", capsys)
    assert torch.equal(safetensors.load_file("weights.safetensors")["weight"], torch.full((3, 2), 9.0))


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        pytest.param("nothing w.pt", 66, id="nothing"),
        pytest.param("empty w.pt", 66, id="empty"),
        pytest.param("torn w.pt", 65, id="torn"),
        pytest.param("run nowhere/w.pt", 73, id="no-folder"),
        pytest.param("run w.pt --part ema", 78, id="no-part"),
    ],
)
def test_what_cannot_be_exported(checkpoints: Path, arguments: str, code: int) -> None:
    Path("empty").mkdir()
    Path("torn").mkdir()
    Path("torn/step-00000001.pt").write_bytes(b"torn")
    with refused(TrainError, arguments.split()[-1] if code in (73, 78) else arguments.split()[0], code=code):
        export.main(arguments.split())


@pytest.mark.parametrize("verb", ["export run weights.pt", "fit --model simple"])
def test_a_machine_without_torch(verb: str, checkpoints: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; from ddptrain.__main__ import main; main()"
    command = [sys.executable, "-c", program, *verb.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (69, "")
    assert_names(done.stderr, verb.split()[0], "torch")


def test_eight_billion_parameters_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        memory_estimate.main(["--params", "8e9", "--optimizer", "adamw", "--dtype", "fp32", "--memory", "80GB"]) == 78
    )
    assert_names(capsys.readouterr().out, "8,000,000,000", "80.0", "29.8", "4", "59.6")


def test_what_the_docs_show(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "".join((Path(__file__).parents[3] / f"docs/{name}.md").read_text() for name in ("checkpoints", "sharding"))
    lines = [
        line.partition("#")[0].split() for line in re.findall(r"^ddptrain ((?:export|fit) .*)$", page, re.MULTILINE)
    ]
    codes = {}
    for verb, *arguments in lines:
        options = [str(checkpoints) if word == "checkpoints" else word for word in arguments]
        codes[verb, *arguments] = {"export": export, "fit": memory_estimate}[verb].main(options)
    assert sorted(codes.values()) == [0, 0, 0, 78, 78]
    state = torch.load(checkpoints / "step-00000009.pt", weights_only=True)["parts"]["model"]
    assert state["weight"].shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "fact"),
    [
        pytest.param("--seed 99999999999999999999", 2, "--seed", id="seed"),
        pytest.param("--rank 0 --world-size 2 --init-method file:///nodir/x", 66, "/nodir", id="no-folder"),
        pytest.param("--model resnet18 --pretrained no.pth", 66, "--pretrained", id="no-weights"),
    ],
)
def test_arguments_with_which_nothing_can_start(tmp_path: Path, arguments: str, code: int, fact: str) -> None:
    command = [sys.executable, "-m", "ddptrain", *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert_names(done.stderr, fact)
