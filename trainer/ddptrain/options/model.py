"""What is trained."""

from dataclasses import dataclass

from ddptrain.options.field import option
from ddptrain.recipes import MODELS


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model."""

    name: str = option("%(choices)s", flag="--model", shapes=True, choices=MODELS)
