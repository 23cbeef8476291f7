"""Options that change how a step is taken, not what it learns: each trains, and ends where it should."""

import re
from pathlib import Path

import pytest
import torch

from ddptrain import training_state
from ddptrain.config import parse_options
from ddptrain.main import run
from ddptrain.training_state import Precision
from ddpwire.signals import Signals

TINY = (
    "--data=synthetic",
    "--synthetic-samples=256",
    "--synthetic-shape=3x16x16",
    "--batch-size=32",
    "--epochs=2",
    "--lr=0.02",
)


@pytest.mark.parametrize(
    "knobs",
    [
        ("--precision=bf16", "--no-channels-last"),
        ("--precision=fp64", "--norm=group"),
        ("--optimizer=adamw", "--lr=0.002", "--clip=1", "--schedule=cosine", "--warmup=0.5"),
        ("--ema=0.9", "--test-flip", "--recompute", "--accumulate=2"),
        ("--mixup=0.2", "--cutmix=1", "--cutout=4", "--erase=0.3", "--flip", "--shift=2", "--input=loader"),
    ],
    ids=" ".join,
)
def test_one_process_learns_and_goes_on_where_it_was(
    knobs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*arguments: str) -> str:
        code = run(parse_options([*TINY, "--model=convnet", "--deterministic", *knobs, *arguments], {}), {}, Signals())
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out

    whole = told("--checkpoint-every=3", "--keep=0")
    losses = [float(loss) for loss in re.findall(r"^epoch .* loss (\S+)", whole, re.M)]
    assert losses[1] < losses[0] or "--mixup=0.2" in knobs  # whose loss says little in two epochs
    for path in Path("checkpoints").glob("step-*"):  # continue from the first, in the middle of an epoch
        if not path.name.startswith("step-00000003"):
            path.unlink()
    again = told()
    assert "checkpoints/step-00000003.pt" in again
    assert "step 4 of 16" in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]  # the weights' fingerprint


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
        found: dict[str, dict[str, object]] = torch.load(newest, weights_only=True)["parts"]
        return found

    assert "scaler" not in parts(1, "fp32")
    scaler = parts(2, "fp16")["scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (1024.0, 8)
    assert parts(3, "fp16")["scaler"]["_growth_tracker"] == 16
    assert "scaler" not in parts(4, "fp32")
