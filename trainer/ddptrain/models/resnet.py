# ruff: noqa: N803 - tensors carry their shape in their name
"""ResNet-18 from scratch (He et al. 2015, https://arxiv.org/abs/1512.03385), its parameters named as torchvision's.

Shapes: B batch, C channels, H height, W width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from ddptrain.models.shape import ImageShape

Norm = Callable[[int], nn.Module]


class Mean(nn.Module):
    """The mean over height and width: AdaptiveAvgPool2d(1), which has no deterministic backward on CUDA."""

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Of shape (B, C)."""
        return features_BCHW.mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, norm(outputs))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Of the same shape, or of half the height and width."""
        shortcut = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return nn.functional.relu_(out)


class ResNet18(nn.Module):
    """The small stem is one 3x3 convolution: ImageNet's stem and pool leave a 32 px image 1x1 before the last block."""

    def __init__(self, shape: ImageShape, *, norm: Norm, small_stem: bool) -> None:
        super().__init__()
        kernel_size, stride, padding = (3, 1, 1) if small_stem else (7, 2, 3)
        self.conv1 = nn.Conv2d(shape.channels, 64, kernel_size, stride=stride, padding=padding, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1, norm), BasicBlock(64, 64, 1, norm))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2, norm), BasicBlock(128, 128, 1, norm))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2, norm), BasicBlock(256, 256, 1, norm))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2, norm), BasicBlock(512, 512, 1, norm))
        self.avgpool = Mean()
        self.fc = nn.Linear(512, shape.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits of shape (B, classes)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images_BCHW))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x))
        return logits
