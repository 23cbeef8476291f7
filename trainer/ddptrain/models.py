# ruff: noqa: N803 - tensors carry their shape in their name
"""The models of the usual tutorials, each a function of what it is to see and to tell apart.

Shapes: B batch, C channels, H height, W width.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from ddptrain.errors import TrainError
from ddpwire.exits import Exit


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """What a model must know of a data set: square images."""

    channels: int
    size_px: int
    classes: int


def simple_model(shape: ImageShape) -> nn.Module:
    """SimpleModel, the multilayer perceptron of the MNIST tutorials."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape.channels * shape.size_px**2, 128), nn.ReLU(), nn.Linear(128, shape.classes)
    )


def convnet(shape: ImageShape) -> nn.Module:
    """ConvNet, two convolutions, of https://yangkky.github.io/2019/07/08/distributed-pytorch-tutorial.html."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))

    head = nn.Linear(32 * (shape.size_px // 4) ** 2, shape.classes)
    return nn.Sequential(layer(shape.channels, 16), layer(16, 32), nn.Flatten(), head)


def image_classifier(shape: ImageShape) -> nn.Module:
    """ImageClassifier, the six convolutions of the CIFAR-10 tutorials."""

    def block(inputs: int, middle: int, outputs: int) -> nn.Module:
        first, second = nn.Conv2d(inputs, middle, 3, padding=1), nn.Conv2d(middle, outputs, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2))

    return nn.Sequential(
        block(shape.channels, 32, 64),
        block(64, 128, 128),
        block(128, 256, 256),
        nn.Flatten(),
        nn.Linear(256 * (shape.size_px // 8) ** 2, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, shape.classes),
    )


def digitsnet(shape: ImageShape) -> nn.Module:
    """Three convolutions for the 8x8 digits. GroupNorm: an image is seen alone, whatever the number of ranks."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU())

    head = nn.Linear(48 * (shape.size_px // 2) ** 2, shape.classes)
    return nn.Sequential(layer(shape.channels, 24), layer(24, 48), nn.MaxPool2d(2), layer(48, 48), nn.Flatten(), head)


class Mean(nn.Module):
    """The mean over height and width: AdaptiveAvgPool2d(1), which has no deterministic backward on CUDA."""

    def forward(self, features_BCHW: Tensor) -> Tensor:
        """Of shape (B, C)."""
        return features_BCHW.mean((2, 3))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, https://arxiv.org/abs/1512.03385)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Of the same shape, or of half the height and width."""
        shortcut = x_BCHW if self.downsample is None else self.downsample(x_BCHW)
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        out = self.bn2(self.conv2(out)) + shortcut
        return nn.functional.relu(out)


class ResNet18(nn.Module):
    """ResNet-18, its parameters named as torchvision names them.

    Up to 64 px the stem is one 3x3 convolution: ImageNet's stem and pool leave a 32 px image 1x1 before the last block.
    """

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        small = shape.size_px <= 64
        kernel_size, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        self.conv1 = nn.Conv2d(shape.channels, 64, kernel_size, stride=stride, padding=padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
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


# The smallest image a model makes sense of: its poolings leave at least a pixel, and its batch norms more than one
# value a channel even where a rank has a single image.
_MODELS: dict[str, tuple[int, Callable[[ImageShape], nn.Module]]] = {
    "simple": (1, simple_model),
    "convnet": (4, convnet),
    "imageclassifier": (8, image_classifier),
    "resnet18": (16, ResNet18),
    "digitsnet": (2, digitsnet),
}


def build_model(name: str, shape: ImageShape) -> nn.Module:
    """The model, freshly initialised. Raises TrainError when the images are too small for it."""
    smallest_px, build = _MODELS[name]
    if shape.size_px < smallest_px:
        fits = ", ".join(other for other, (smallest, _) in _MODELS.items() if smallest <= shape.size_px)
        raise TrainError(
            Exit.CONFIG,
            f"--model {name} needs images of at least {smallest_px} px, these have {shape.size_px}; "
            f"models that fit: {fits}",
        )
    return build(shape)
