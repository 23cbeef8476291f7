"""Small pictures of characters: a line of bars for numbers over time, a bar of shares. Text from values."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

BLOCKS, PLAIN = "▁▂▃▄▅▆▇█", "_.-=+*%#"


def sparkline(values: Sequence[float | None], width: int, *, plain: bool = False) -> str:
    """The values from their least to their largest, as many as fit; a gap where there is none."""
    ramp = PLAIN if plain else BLOCKS
    shown = _fit(values, width)
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = len(ramp) - 1
    return "".join(" " if one is None else ramp[round((one - low) / span * steps) if span else 0] for one in shown)


def _fit(values: Sequence[float | None], width: int) -> list[float | None]:
    """At the most ``width`` values: each the mean of those in its share."""
    if len(values) <= width:
        return list(values)
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    found: list[float | None] = []
    for start, end in pairwise(cuts):
        known = [value for value in values[start:end] if value is not None]
        found.append(sum(known) / len(known) if known else None)
    return found


def shares(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """How many of ``width`` characters each part gets: all of them together, the largest remainders first."""
    whole = sum(parts.values())
    if whole <= 0:
        return {}
    exact = {name: part / whole * width for name, part in parts.items()}
    found = {name: int(size) for name, size in exact.items()}
    for name in sorted(exact, key=lambda name: found[name] - exact[name])[: width - sum(found.values())]:
        found[name] += 1
    return found


def meter(share: float, width: int, *, plain: bool = False) -> str:
    """A bar that is full at 1."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return ("#" if plain else "█") * full + ("." if plain else "░") * (width - full)
