"""The learning rate as a function of the step: nothing to save, nothing to restore."""

import math
from collections.abc import Callable

WARM_UP = 0.3  # share of the steps
START = (
    1 / 25
)  # of the peak; both as in L. N. Smith, N. Topin 2017, https://arxiv.org/abs/1708.07120, and torch's OneCycleLR


def one_cycle(fraction: float) -> float:
    """The share of the peak: up by a cosine to 1, down by a cosine to 0."""
    if fraction < WARM_UP:
        return 1 + (START - 1) * cosine(fraction / WARM_UP)
    return cosine((fraction - WARM_UP) / (1 - WARM_UP))


def cosine(fraction: float) -> float:
    """The share of the peak: from 1 to 0."""
    return (1 + math.cos(math.pi * fraction)) / 2


SCHEDULES: dict[str, Callable[[float], float]] = {"one-cycle": one_cycle, "cosine": cosine}


def learning_rate(schedule: str, *, peak: float, step: int, num_steps: int) -> float:
    """That of step number ``step`` from 0, of ``num_steps``."""
    return peak * SCHEDULES[schedule](step / num_steps)
