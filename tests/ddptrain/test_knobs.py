"""Options that change how a step is taken, not what it learns: each trains, and ends where it should."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddptrain.main import run
from ddptrain.options import parse
from ddpwire.signals import Signals

TINY = (
    "--data=synthetic",
    "--synthetic-samples=256",
    "--synthetic-shape=3x16x16",
    "--batch-size=32",
    "--epochs=2",
    "--lr=0.02",
)


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    values = torch.load(max(folder.glob("step-*.pt")), weights_only=True)
    model: dict[str, torch.Tensor] = values["parts"]["model"]
    return model


@pytest.mark.parametrize(
    ("knobs", "tolerance"),
    [
        (("--no-bucket-view", "--bucket-mb=0.01"), 1e-4),
        (("--static-graph",), 1e-4),
        (("--compress=bf16",), 0.1),
        (("--compress=fp16",), 0.02),
        (("--accumulate=3",), 1e-4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_two_ranks_learn_nearly_the_same(
    knobs: tuple[str, ...], tolerance: float, train: Callable[..., list], tmp_path: Path
) -> None:
    common = (*TINY, "--model=convnet", "--norm=group", "--precision=fp32", "--epochs=1")
    ends = [train(*common, *which, f"--checkpoint-dir=of{number}", size=2) for number, which in enumerate(((), knobs))]
    assert [(one.code, one.err) for end in ends for one in end] == [(0, "")] * 4
    plain, other = (final_weights(tmp_path / f"of{number}") for number in range(2))
    worst = max(float((plain[name] - other[name]).abs().max() / plain[name].abs().max()) for name in plain)
    assert worst < tolerance


@pytest.mark.parametrize(
    "knobs",
    [
        ("--precision=bf16", "--no-channels-last"),
        ("--precision=fp64", "--norm=group"),
        ("--optimizer=adamw", "--lr=0.002", "--clip=1", "--schedule=cosine", "--warmup=0.5"),
        ("--ema=0.9", "--test-flip", "--recompute", "--accumulate=2", "--model=resnet18"),
        ("--mixup=0.2", "--cutmix=1", "--cutout=4", "--erase=0.3", "--flip", "--shift=2", "--input=loader"),
    ],
    ids=" ".join,
)
def test_one_process_learns_and_goes_on_where_it_was(
    knobs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*arguments: str) -> str:
        code = run(parse([*TINY, "--model=convnet", "--deterministic", *knobs, *arguments], {}), {}, Signals())
        out, err = capfd.readouterr()
        assert (code, err) == (0, "")
        return out

    whole = told("--checkpoint-every=3", "--keep=0")
    losses = [float(loss) for loss in re.findall(r"^epoch .* loss (\S+)", whole, re.M)]
    assert losses[1] < losses[0] or "--mixup=0.2" in knobs  # whose loss says little in two epochs
    for path in Path("checkpoints").glob("step-*"):  # go on from the first, in the middle of an epoch
        if not path.name.startswith("step-00000003"):
            path.unlink()
    again = told()
    assert "going on at step 4 of 16" in again
    assert whole.splitlines()[-1] == again.splitlines()[-1]  # the weights' fingerprint


@pytest.mark.skipif(shutil.which("g++", path="/usr/bin:/usr/local/bin") is None, reason="torch.compile needs g++")
def test_compiled(train: Callable[..., list]) -> None:
    ended = train(*TINY, "--model=simple", "--compile=default", environ={"PATH": "/usr/bin:/usr/local/bin:/bin"})
    own = [line for line in ended[0].err.splitlines() if "No CUDA runtime is found" not in line]  # torch's compiler
    assert (ended[0].code, own) == (0, [])
