# ruff: noqa: N803 - tensors carry their shape in their name
"""CifarNet, the networks of K. Jordan's speed runs on CIFAR-10 (2024, https://arxiv.org/abs/2404.00498).

Shapes: B batch, C channels, H height, W width.
"""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddptrain.data.base import ImageShape

PATCH_PX = 2
MIN_VARIANCE = 5e-4  # added to the variance of a patch before whitening divides by it
LOGIT_SCALE = 1 / 9


class Conv(nn.Linear):
    """A 3x3 convolution whose first filters are the identity. Its weight is a matrix, as torch's Muon needs it.

    A row is a filter in channels_last order, so no step copies the weight.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(9 * inputs, outputs, bias=False)
        nn.init.dirac_(self.filters.detach()[:inputs])

    @property
    def filters(self) -> Tensor:
        """The weight as a view of shape (outputs, inputs, 3, 3)."""
        return self.weight.view(self.out_features, 3, 3, -1).permute(0, 3, 1, 2)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features of the same height and width."""
        return functional.conv2d(x_BCHW, self.filters, padding=1)


class Group(nn.Module):
    """Two convolutions, of which the first is pooled. A deep group has a third convolution and a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, deep: bool) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * (3 if deep else 2)]
        self.convs = nn.ModuleList(Conv(*pair) for pair in pairwise(widths))
        # Few steps need statistics that follow quickly.
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(outputs, eps=1e-12, momentum=0.1 if deep else 0.4) for _ in widths[1:]
        )
        for norm in self.norms:
            cast(Tensor, norm.weight).requires_grad = False

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features of half the height and width."""
        x = shortcut = functional.gelu(self.norms[0](functional.max_pool2d(self.convs[0](x_BCHW), 2)))
        x = functional.gelu(self.norms[1](self.convs[1](x)))
        return x if len(self.convs) == 2 else functional.gelu(self.norms[2](self.convs[2](x)) + shortcut)


class CifarNet(nn.Module):
    """A whitening layer, three groups of convolutions, and a linear layer."""

    def __init__(self, shape: ImageShape, *, deep: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(shape.channels, 2 * shape.channels * PATCH_PX**2, PATCH_PX)
        self.stem.weight.requires_grad = False
        nn.init.zeros_(cast(Tensor, self.stem.bias))
        widths = (self.stem.out_channels, *((128, 384, 512) if deep else (64, 256, 256)))
        self.groups = nn.Sequential(*(Group(*pair, deep=deep) for pair in pairwise(widths)))
        self.pool = nn.MaxPool2d((shape.size_px - 1) // 8)
        self.head = nn.Linear(widths[-1], shape.classes, bias=False)

    @torch.no_grad()
    def whiten(self, images_BCHW: Tensor) -> None:
        """Set the weights of the first layer, so that its outputs for the patches of images are uncorrelated.

        The filters are the eigenvectors of the patches' covariance, divided by their standard deviations, and the same
        filters with the opposite sign.
        """
        patches = functional.unfold(images_BCHW.double(), PATCH_PX).transpose(0, 1).flatten(1)
        variances, vectors = torch.linalg.eigh(patches @ patches.T / patches.shape[1])
        filters = (vectors / (variances + MIN_VARIANCE).sqrt()).T.reshape(-1, *self.stem.weight.shape[1:])
        self.stem.weight.copy_(torch.cat([filters, -filters]))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Return logits of shape (B, classes)."""
        x = self.groups(functional.gelu(self.stem(images_BCHW)))
        return cast(Tensor, self.head(self.pool(x).flatten(1))) * LOGIT_SCALE
