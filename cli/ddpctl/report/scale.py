"""Numbers on an axis: where its ticks are, and how they read. Pure."""

import math

from ddpctl.words import span

STEPS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400)
SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 2.5, 5, 10) if power * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def time_ticks(seconds: float, number: int = 8) -> list[float]:
    """Round times from 0 on."""
    step = next((step for step in STEPS_S if step * number >= seconds), 86400.0 * math.ceil(seconds / 86400 / number))
    return [index * step for index in range(int(seconds / step + 1e-9) + 1)]


def clock(seconds: float) -> str:
    """A round time on an axis: 0.2 s, 45 s, 3:00."""
    return f"{seconds:.3g} s" if seconds < 120 else span(seconds)


def short(value: float) -> str:
    """A number in four digits or so: 1.25 k."""
    for size, suffix in SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.4g} {suffix}"
    return f"{value:.4g}"
