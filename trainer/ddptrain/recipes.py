"""What a plain ``ddptrain --data X`` means: a model and the numbers that train it well. Knows nothing of torch."""

from dataclasses import dataclass

MODELS = ("simple", "convnet", "imageclassifier", "resnet18", "digitsnet")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The defaults of the options that depend on the data set."""

    model: str
    epochs: int
    batch_size: int  # samples an optimizer step, over all ranks
    lr: float  # the peak
    weight_decay: float
    label_smoothing: float


RECIPES = {
    "digits": Recipe(model="digitsnet", epochs=10, batch_size=32, lr=0.1, weight_decay=2e-3, label_smoothing=0.05),
    "mnist": Recipe(model="convnet", epochs=5, batch_size=100, lr=0.05, weight_decay=5e-4, label_smoothing=0.0),
    "cifar10": Recipe(model="resnet18", epochs=30, batch_size=128, lr=0.1, weight_decay=5e-4, label_smoothing=0.1),
    "synthetic": Recipe(model="convnet", epochs=3, batch_size=64, lr=0.05, weight_decay=5e-4, label_smoothing=0.0),
}
