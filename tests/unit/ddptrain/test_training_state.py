# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""The operations of a step, against those that are counted by hand; scalars for TensorBoard."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.wording import Wording
from torch import nn

from ddptrain.training_state import sample_flops

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")


def test_products_and_convolutions_are_counted_and_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convolution = 2 * (3 * 3 * 3) * 8 * 16 * 16
    linear = 2 * (8 * 16 * 16) * 10
    assert sample_flops(model, torch.zeros(1, 3, 16, 16)) == 3 * (convolution + linear)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_is_counted() -> None:
    class Attention(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            tokens_BHSD = images_BCHW.reshape(1, 2, 8, 16)
            return nn.functional.scaled_dot_product_attention(tokens_BHSD, tokens_BHSD, tokens_BHSD)

    scores = values = 2 * (2 * 8 * 8 * 16)
    assert sample_flops(Attention(), torch.zeros(1, 4, 8, 8)) == 3 * (scores + values)


def test_a_model_that_takes_no_single_image_is_not_counted() -> None:
    class Choosy(nn.Module):
        def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"a batch of {len(images_BCHW)}")

    assert sample_flops(Choosy(), torch.zeros(1, 3, 8, 8)) == 0


def test_an_epoch_is_a_point(train: Callable[..., list], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = train(*TINY, "--epochs=3", "--tensorboard=board", size=2)
    assert [(one.code, one.err) for one in ended] == [(0, "")] * 2
    assert len(list((tmp_path / "board").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["test/accuracy", "train/images_per_s", "train/loss", "train/lr"]
    assert [point.step for point in events.Scalars("train/loss")] == [4, 8, 12]
    assert [round(point.value * 8) for point in events.Scalars("test/accuracy")][-1] == ended[0].right


def test_without_tensorboard_the_option_is_refused(
    train: Callable[..., list], tmp_path: Path, wording: Wording
) -> None:
    fake = tmp_path / "tensorboard"  # in the current folder
    fake.mkdir()
    (fake / "__init__.py").write_text("raise ImportError('not here')")
    ended = train(*TINY, "--tensorboard=board")[0]
    assert ended.code == 66
    wording(ended.err)
