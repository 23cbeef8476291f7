"""A step of ``--deterministic`` does the same sums and draws the same numbers wherever its process started."""

import sys
from pathlib import Path

import exact
import pytest
from tests import forks
from tests.unit.ddptrain import test_deterministic
from tests.unit.ddptrain.test_deterministic import layouts
from torch.nn.parallel import DistributedDataParallel

from ddprank.signals import Signals
from ddptrain.config import parse_options
from ddptrain.data.base import ImageShape
from ddptrain.main import run
from ddptrain.models import build_model


def test_three_ranks_killed_in_the_middle_end_with_the_undisturbed_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One row of bench/exact.py; tests/cluster/test_exact.py has more."""
    monkeypatch.setattr(exact, "run_python", forks.run)
    monkeypatch.setattr(sys, "argv", ["exact.py", "--groups", "ranks", "--rows", "^3 ranks"])
    with pytest.raises(SystemExit) as ended:
        exact.main()
    output, errors = capsys.readouterr()
    assert ended.value.code == 0, output + errors
    assert output.count(" equal |") == 1


def test_dropout_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = (
        "--data=synthetic",
        "--synthetic-shape=3x32x32",
        "--synthetic-samples=16",
        "--batch-size=4",
        "--epochs=1",
    )
    model = ("--model=torchvision:mobilenet_v3_small", "--deterministic", "--checkpoint-every=2", "--keep=0")

    def last_line() -> str:
        assert run(parse_options([*options, *model], {}), {}, Signals()) == 0
        return capfd.readouterr().out.splitlines()[-1]

    whole = last_line()
    for path in Path("checkpoints").glob("step-00000004.*"):
        path.unlink()
    assert last_line() == whole


group = test_deterministic.group  # the fixture


def test_without_it_the_second_step_has_another_layout_than_the_first(group: None) -> None:
    """What torch does, and what makes the call necessary: when this fails, it no longer is."""
    model = build_model("convnet", ImageShape(channels=1, size_px=8, classes=10))
    first, second, third = layouts(DistributedDataParallel(model, bucket_cap_mb=0.01))
    assert first != second == third
