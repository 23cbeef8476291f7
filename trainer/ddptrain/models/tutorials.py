"""The small models of the usual tutorials, each a function of what it is to see and to tell apart."""

from torch import nn

from ddptrain.models.resnet import Norm
from ddptrain.models.shape import ImageShape


def simple_model(shape: ImageShape) -> nn.Module:
    """SimpleModel, the multilayer perceptron of the MNIST tutorials."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(shape.channels * shape.size_px**2, 128), nn.ReLU(), nn.Linear(128, shape.classes)
    )


def _pooled() -> tuple[nn.Module, nn.Module]:
    """ReLU and MaxPool2d(2), the other way round: the same numbers and gradients, with a quarter of the ReLU's work."""
    return nn.MaxPool2d(2), nn.ReLU(inplace=True)


def convnet(shape: ImageShape, norm: Norm) -> nn.Module:
    """ConvNet, two convolutions, of https://yangkky.github.io/2019/07/08/distributed-pytorch-tutorial.html."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=5, padding=2)
        return nn.Sequential(convolution, norm(outputs), *_pooled())

    head = nn.Linear(32 * (shape.size_px // 4) ** 2, shape.classes)
    return nn.Sequential(layer(shape.channels, 16), layer(16, 32), nn.Flatten(), head)


def image_classifier(shape: ImageShape) -> nn.Module:
    """ImageClassifier, the six convolutions of the CIFAR-10 tutorials."""

    def block(inputs: int, middle: int, outputs: int) -> nn.Module:
        first, second = nn.Conv2d(inputs, middle, 3, padding=1), nn.Conv2d(middle, outputs, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(inplace=True), second, *_pooled())

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
