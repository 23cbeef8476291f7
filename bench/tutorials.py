"""The training loops of tutorials, with which bench/train.py compares ddptrain.

They prepare one sample at a time with PIL, train in float32, and read the loss after every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

from ddptrain.data.base import ImageShape
from ddptrain.models import build_model

NUM_IMAGES = 4096
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings that all ways of training share."""

    model: str
    shape: ImageShape
    batch_size: int  # of a rank
    augmented: bool  # crop and flip
    stem: str = "auto"
    rank: int = 0
    size: int = 1
    device: str = "cpu"

    def new_model(self) -> nn.Module:
        torch.manual_seed(0)
        if self.model == "resnet18":
            return build_model(self.model, self.shape, stem=self.stem)
        return convnet() if self.model == "convnet" else image_classifier()


def convnet() -> nn.Module:
    """Return the model of https://yangkky.github.io/2019/07/08/distributed-pytorch-tutorial.html."""

    def layer(inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=5, stride=1, padding=2)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(kernel_size=2, stride=2))

    return nn.Sequential(layer(1, 16), layer(16, 32), nn.Flatten(), nn.Linear(7 * 7 * 32, 10))


def image_classifier() -> nn.Module:
    """Return the model of the CIFAR-10 tutorials."""

    def block(inputs: int, middle: int, outputs: int) -> list[nn.Module]:
        first, second = nn.Conv2d(inputs, middle, 3, padding=1), nn.Conv2d(middle, outputs, 3, padding=1)
        return [first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2, 2)]

    convolutions = [*block(3, 32, 64), *block(64, 128, 128), *block(128, 256, 256)]
    head = [nn.Linear(256 * 4 * 4, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *head)


SETTINGS = {
    "ConvNet": Setting(
        model="convnet", shape=ImageShape(channels=1, size_px=28, classes=10), batch_size=100, augmented=False
    ),
    "ImageClassifier": Setting(
        model="imageclassifier", shape=ImageShape(channels=3, size_px=32, classes=10), batch_size=64, augmented=True
    ),
    "ResNet-18": Setting(
        model="resnet18", shape=ImageShape(channels=3, size_px=32, classes=10), batch_size=128, augmented=True
    ),
    "ResNet-18 (ImageNet stem)": Setting(
        model="resnet18",
        shape=ImageShape(channels=3, size_px=32, classes=10),
        batch_size=128,
        augmented=True,
        stem="imagenet",
    ),
}

Steps = Callable[[int], None]  # train so many steps


class Pictures(Dataset):
    """A dataset like torchvision's MNIST and CIFAR10: each image of an array becomes a PIL image and is transformed."""

    def __init__(self, setting: Setting) -> None:
        shape, generator = setting.shape, np.random.default_rng(0)
        size = (NUM_IMAGES, shape.size_px, shape.size_px, shape.channels)
        images = generator.integers(0, 256, size, dtype=np.uint8)
        self.images = images[..., 0] if shape.channels == 1 else images
        self.labels = (np.arange(NUM_IMAGES) % shape.classes).tolist()
        changes = [transforms.RandomCrop(shape.size_px, padding=4), transforms.RandomHorizontalFlip()]
        middle = (0.5,) * shape.channels
        self.transform = transforms.Compose(
            [*(changes if setting.augmented else []), transforms.ToTensor(), transforms.Normalize(middle, middle)]
        )

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def loader(setting: Setting) -> DataLoader:
    """Return a loader that shuffles. It has no workers, so the CPU time of the process includes the loader's."""
    data = Pictures(setting)
    sampler = DistributedSampler(data, setting.size, setting.rank) if setting.size > 1 else None
    return DataLoader(data, batch_size=setting.batch_size, shuffle=sampler is None, sampler=sampler, drop_last=True)


def endless(batches: DataLoader):
    while True:
        yield from batches


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def tutorial(setting: Setting) -> Steps:
    device = torch.device(setting.device)
    model = setting.new_model().to(device)
    if setting.size > 1:
        model = DistributedDataParallel(model)
    optim = optimizer(model)
    criterion = nn.CrossEntropyLoss()
    batches = endless(loader(setting))
    running = [0.0]

    def steps(count: int) -> None:
        for _ in range(count):
            images, labels = next(batches)
            images, labels = images.to(device), labels.to(device)
            loss = criterion(model(images), labels)
            optim.zero_grad()
            loss.backward()
            optim.step()
            running[0] += loss.item()

    return steps
