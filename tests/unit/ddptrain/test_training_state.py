# ruff: noqa: N803, N806 - tensors carry their shape in their name
"""The operations of a step, against those that are counted by hand; scalars for TensorBoard."""

import torch
from torch import nn

from ddptrain.training_state import sample_flops


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
