"""Options that change how a step is taken, not what it learns: each trains, and ends where it should."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddprank.signals import Signals
from ddptrain import training_state
from ddptrain.config import parse_options
from ddptrain.main import run
from ddptrain.training_state import Precision

TINY = ("--data=synthetic", "--synthetic-samples=256", "--synthetic-shape=3x16x16", "--batch-size=32", "--epochs=2")
TINY += ("--lr=0.02",)
CONVNET = (*TINY, "--model=convnet", "--norm=group", "--precision=fp32", "--epochs=1")


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    values = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    model: dict[str, torch.Tensor] = values["parts"]["model"]
    return model


def train_plainly(train: Callable[..., list], folder: Path, *options: str, size: int = 1) -> None:
    """Train once with these options alone; a later test finds the checkpoint."""
    if not folder.exists():
        ended = train(*options, f"--checkpoint-dir={folder}", size=size)
        assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * size


def difference(folder: Path, other: Path) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    ours, theirs = final_weights(folder), final_weights(other)
    return max(float((ours[name] - theirs[name]).abs().max() / ours[name].abs().max()) for name in ours)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of trainings without knobs, in a folder for each, made when a test first needs one."""
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize(
    ("knobs", "tolerance"),
    [
        (("--no-bucket-view", "--bucket-mb=0.01"), 1e-4),
        (("--static-graph",), 1e-4),
        (("--compress=bf16",), 0.1),
        (("--compress=fp16",), 0.02),
        (("--accumulate=3",), 1e-4),
        (("--communication=powersgd:64",), 0.05),
        (("--communication=localsgd:1",), 0.05),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_two_ranks_learn_nearly_the_same(
    knobs: tuple[str, ...], tolerance: float, train: Callable[..., list], tmp_path: Path, plain: Path
) -> None:
    train_plainly(train, plain / "two", *CONVNET, size=2)
    ended = train(*CONVNET, *knobs, "--checkpoint-dir=knobs", size=2)
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2
    assert difference(plain / "two", tmp_path / "knobs") < tolerance


@pytest.mark.parametrize("model", ["convnet", "digitsnet"])
def test_the_memory_format_changes_the_rounding_alone(
    model: str, train: Callable[..., list], tmp_path: Path, plain: Path
) -> None:
    common = CONVNET if model == "convnet" else (*TINY, "--model=digitsnet", "--precision=fp32", "--epochs=1")
    train_plainly(train, plain / model, *common)
    (ended,) = train(*common, "--no-channels-last", "--checkpoint-dir=laid-out")
    assert (ended.code, ended.err) == (0, "")
    assert difference(plain / model, tmp_path / "laid-out") < 1e-4


@pytest.mark.skipif(shutil.which("g++", path="/usr/bin:/usr/local/bin") is None, reason="torch.compile needs g++")
def test_compiled_it_ends_within_rounding(train: Callable[..., list], tmp_path: Path, plain: Path) -> None:
    common = (*TINY, "--model=simple", "--precision=fp32", "--epochs=1")
    train_plainly(train, plain / "simple", *common)
    environ = {"PATH": "/usr/bin:/usr/local/bin:/bin", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    ended = train(*common, "--compile=default", "--checkpoint-dir=compiled", environ=environ)
    own = [line for line in ended[0].err.splitlines() if "No CUDA runtime is found" not in line]  # torch's compiler
    assert (ended[0].code, own) == (0, [])
    assert difference(plain / "simple", tmp_path / "compiled") < 1e-4


def test_fp16_goes_on_from_another_precision_with_a_fresh_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The scaler of fp16, which CPUs do not have, with the arithmetic of fp32."""
    monkeypatch.chdir(tmp_path)

    def parts(epochs: int, name: str) -> dict[str, dict[str, object]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if name == "fp16" else None
        precision = Precision(name=name, compute=torch.float32, weights=torch.float32, scaler=scaler)
        monkeypatch.setattr(training_state, "choose_precision", lambda *_: precision)
        code = run(
            parse_options([*TINY, "--model=simple", f"--epochs={epochs}", "--checkpoint-every=5"], {}), {}, Signals()
        )
        assert (code, capfd.readouterr().err) == (0, "")
        newest = max(Path("checkpoints").glob("step-*.pt"))
        assert newest.name == f"step-{8 * epochs:08d}.pt"
        saved_parts: dict[str, dict[str, object]] = torch.load(newest, weights_only=True)["parts"]
        return saved_parts

    assert "scaler" not in parts(1, "fp32")
    scaler = parts(2, "fp16")["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (1024.0, 8)
    assert parts(3, "fp16")["scaler"]["_growth_tracker"] == 16
    assert "scaler" not in parts(4, "fp32")


@pytest.mark.parametrize(
    "knobs",
    [
        ("--precision=bf16", "--no-channels-last"),
        ("--precision=fp64", "--norm=group"),
        ("--optimizer=adamw", "--lr=0.002", "--clip=1", "--schedule=cosine", "--warmup=0.5"),
        ("--ema=0.9", "--test-flip", "--test-shift=1", "--recompute", "--accumulate=2"),
        (
            "--model=cifarnet",
            "--synthetic-shape=3x17x17",
            "--synthetic-samples=64",
            "--batch-size=8",
            "--optimizer=muon",
        ),
        ("--mixup=0.2", "--cutmix=1", "--cutout=4", "--erase=0.3", "--flip", "--shift=2", "--input=loader"),
    ],
    ids=" ".join,
)
def test_one_process_learns_and_goes_on_where_it_was(
    knobs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def output_of(*arguments: str) -> str:
        code = run(parse_options([*TINY, "--model=convnet", "--deterministic", *knobs, *arguments], {}), {}, Signals())
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out

    whole = output_of("--checkpoint-every=3", "--keep=0")
    losses = [float(loss) for loss in re.findall(r"^epoch .* loss (\S+)", whole, re.M)]
    assert losses[1] < losses[0] or "--mixup=0.2" in knobs  # whose loss says little in two epochs
    for path in Path("checkpoints").glob("step-*"):  # continue from the first, in the middle of an epoch
        if not path.name.startswith("step-00000003"):
            path.unlink()
    again = output_of()
    assert "checkpoints/step-00000003.pt" in again
    assert "step 4 of 16" in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]  # the weights' fingerprint
