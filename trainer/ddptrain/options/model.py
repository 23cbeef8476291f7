"""What is trained."""

from dataclasses import dataclass

from ddptrain.options.field import option

MODELS = ("simple", "convnet", "imageclassifier", "resnet18", "digitsnet")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and what it starts from."""

    name: str = option(
        f"{', '.join(MODELS)}, or a classifier of torchvision by its name: resnet50, torchvision:resnet18",
        flag="--model",
        shapes=True,
        metavar="NAME",
    )
    pretrained: str | None = option(
        "start from torchvision's ImageNet weights, or from those in a file, with a new head",
        nargs="?",
        const="imagenet",
        default=None,
        metavar="FILE",
    )
    stem: str = option(
        "first layer of a ResNet: imagenet's shrinks images to a quarter, small not at all; auto: small up to 64 px",
        shapes=True,
        choices=("auto", "small", "imagenet"),
        default="auto",
    )
    norm: str = option(
        "of convnet and resnet18; group: an image is seen alone, whatever the batch",
        shapes=True,
        choices=("batch", "group"),
        default="batch",
    )
    recompute: bool = option("keep fewer activations and compute them again in the backward pass", default=False)
