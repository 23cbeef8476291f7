"""The operations of a step, against those that are counted by hand; scalars for TensorBoard."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.messages import assert_names

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")


def test_an_epoch_is_a_point(train: Callable[..., list], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = train(*TINY, "--epochs=3", "--tensorboard=board", size=2)
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * 2
    assert len(list((tmp_path / "board").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["test/accuracy", "train/images_per_s", "train/loss", "train/lr"]
    assert [point.step for point in events.Scalars("train/loss")] == [4, 8, 12]
    assert [round(point.value * 8) for point in events.Scalars("test/accuracy")][-1] == ended[0].right


def test_without_tensorboard_the_option_is_refused(train: Callable[..., list], tmp_path: Path) -> None:
    fake = tmp_path / "tensorboard"  # in the current folder
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('not here')")
    ended = train(*TINY, "--tensorboard=board")[0]
    assert ended.code == 66
    assert_names(ended.err, "--tensorboard")
