"""The learning rate as a function of the step: nothing to save, nothing to restore."""

import math

from ddptrain.options.optimizer import OptimizerOptions

WARM_UP = 0.3  # share of the steps
START = (
    1 / 25
)  # of the peak; both as in L. N. Smith, N. Topin 2017, https://arxiv.org/abs/1708.07120, and torch's OneCycleLR
SCALED_WARM_UP_EPOCHS = (
    5.0  # for a rate that is multiplied by the ranks: P. Goyal et al. 2017, https://arxiv.org/abs/1706.02677
)


def learning_rate(how: OptimizerOptions, *, ranks: int, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """That of step number ``step`` from 0, of ``num_steps``."""
    peak = how.lr * (ranks if how.scale_lr else 1)
    if how.schedule == "one-cycle":
        return peak * one_cycle(step / num_steps)
    warm_up = warm_up_steps(how, num_steps=num_steps, steps_per_epoch=steps_per_epoch)
    if step < warm_up:
        start = how.lr if how.scale_lr else 0.0
        return start + (peak - start) * (step + 1) / (warm_up + 1)
    if how.schedule == "cosine":
        return peak * cosine((step - warm_up) / (num_steps - warm_up))
    if how.schedule == "steps":
        epoch = step // steps_per_epoch
        return float(peak * how.gamma ** sum(epoch >= milestone for milestone in how.milestones))
    return peak


def warm_up_steps(how: OptimizerOptions, *, num_steps: int, steps_per_epoch: int) -> int:
    """Steps on the way up to the peak, of the schedules that are not a cycle."""
    epochs = how.warmup
    if epochs is None:
        epochs = min(SCALED_WARM_UP_EPOCHS, num_steps / steps_per_epoch / 4) if how.scale_lr else 0.0
    return min(num_steps - 1, round(epochs * steps_per_epoch))


def one_cycle(fraction: float) -> float:
    """The share of the peak: up by a cosine to 1, down by a cosine to 0."""
    if fraction < WARM_UP:
        return 1 + (START - 1) * cosine(fraction / WARM_UP)
    return cosine((fraction - WARM_UP) / (1 - WARM_UP))


def cosine(fraction: float) -> float:
    """The share of the peak: from 1 to 0."""
    return (1 + math.cos(math.pi * fraction)) / 2
