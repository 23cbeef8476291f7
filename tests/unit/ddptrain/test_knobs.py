"""Options that change how a step is taken, not what it learns: each trains, and ends where it should."""

import re
from pathlib import Path

import pytest

from ddptrain.config import parse_options
from ddptrain.main import run
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
