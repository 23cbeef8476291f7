"""A training that was disturbed ends with the weights of one that was not."""

import sys
from collections.abc import Callable
from pathlib import Path

import kills
import pytest
import torch
from tests import forks
from torch import Tensor

from ddptrain.checkpoint import load_checkpoint

KILLS = 3  # bench/kills.py does 20


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(load_checkpoint(max(folder.glob("step-*.pt"))).parts["model"])


def test_two_ranks_then_one_then_two_are_two_ranks_to_the_last_digits(
    train: Callable[..., list], tmp_path: Path
) -> None:
    """GroupNorm, float64; the stops are in the middle of epochs."""
    script = str(Path(__file__).with_name("exact.py"))
    undisturbed = ("0", "--epochs=3", "--deterministic", "--precision=fp64", "--checkpoint-dir=whole")
    assert train(*undisturbed, size=2, command=(script,))[0].code == 0
    options = ("--epochs=3", "--deterministic", "--precision=fp64", "--checkpoint-dir=parts")
    stops = []
    for size, steps, code in ((2, "20", 143), (1, "50", 143), (2, "0", 0)):
        ended = train(steps, *options, size=size, command=(script,))
        assert [(rank.code, rank.err) for rank in ended] == [(code, "")] * size
        stops.append(int(max((tmp_path / "parts").glob("step-*.pt")).name[5:13]))
    assert stops[0] < stops[1] < stops[2] == 135
    assert stops[0] % 45
    assert stops[1] % 45
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(weight.dtype == torch.float64 for weight in whole.values())
    worst = max(float((parts[name] - weight).abs().max() / weight.abs().max()) for name, weight in whole.items())
    assert worst < 1e-12


def test_killed_at_random_steps_and_started_again_by_ddprun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank's SIGKILL ends no run, and changes no weight."""
    monkeypatch.setattr(kills, "start_python", forks.start)
    monkeypatch.setattr(sys, "argv", ["kills.py", f"--kills={KILLS}", "--epochs=4"])
    with pytest.raises(SystemExit) as ended:
        kills.main()
    output, errors = capsys.readouterr()
    assert (ended.value.code, errors) == (0, "")
    assert f"kills            {KILLS} " in output
    assert output.endswith(": equal\n")
