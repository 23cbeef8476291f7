"""What a group of options is made of: fields that know their flag, and the types of their values."""

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, field
from typing import Any


def option(
    text: str, *, shapes: bool = False, flag: str = "", default: Any = MISSING, boolean: bool = False, **argument: Any
) -> Any:
    """A field that is an option; ``flag`` where the field's name does not say it, ``argument`` goes to argparse.

    ``boolean``: --name and --no-name, as every option whose default is a bool.
    ``shapes``: a checkpoint trained with another value cannot be gone on with. Without a default, the recipe has it.
    """
    if boolean or isinstance(default, bool):
        argument.setdefault("action", argparse.BooleanOptionalAction)
    return field(default=default, metadata={"shapes": shapes, "flag": flag, "argument": {"help": text, **argument}})


def flag_of(item: Field[Any]) -> str:
    """The flag of a field."""
    return item.metadata["flag"] or "--" + item.name.replace("_", "-")


def key_of(item: Field[Any]) -> str:
    """What a field is called where all groups meet: in a checkpoint, in argparse."""
    return flag_of(item).removeprefix("--").replace("-", "_")


def whole(lowest: int, highest: int = 2**63 - 1) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``lowest`` to ``highest``, by default what 64 bits hold."""

    def parse_whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if not lowest <= value <= highest:
            upto = f" to {highest}" if value > highest else ""
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {lowest}{upto}")
        return value

    return parse_whole


def real(lowest: float, below: float = math.inf) -> Callable[[str], float]:
    """An argparse type: numbers from ``lowest`` to under ``below``."""

    def parse_real(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not lowest <= value < below:
            upper = "" if below == math.inf else f" and below {below:g}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {lowest:g}{upper}")
        return value

    return parse_real


def image_shape(text: str) -> tuple[int, int, int]:
    """An argparse type: CxHxW with H = W."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts) or parts[1] != parts[2]:
        raise argparse.ArgumentTypeError(f"{text!r} is not CHANNELSxSIZExSIZE, such as 3x32x32")
    return int(parts[0]), int(parts[1]), int(parts[2])


def milestones(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers that grow, with commas between them."""
    parts = text.split(",")
    values = tuple(int(part) for part in parts if part.isdecimal())
    if len(values) != len(parts) or list(values) != sorted(set(values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of epochs such as 30,60,80")
    return values
