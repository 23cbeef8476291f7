"""What a fault did to a training, and whether that is what was to be expected. Pure."""

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bars:
    """What a row of the table must keep to; None: does not apply."""

    noticed_s: float | None = None
    again_s: float | None = None  # until all ranks have made a step again
    ended_s: float | None = None  # until the last node's launcher has ended
    steps_lost: int | None = 10
    gone_s: float = 2.0  # until nothing is left of what was to end


@dataclass(frozen=True, kw_only=True)
class Told:
    """One fault, seen from outside. Times count from the fault."""

    noticed_s: float | None = None  # until every launcher that lives has said so
    again_s: float | None = None
    ended_s: float | None = None
    steps_lost: int | None = None
    gone_s: float | None = None
    orphans: int = 0  # processes left at the end
    expected: dict[str, object] = field(default_factory=dict)
    found: dict[str, object] = field(default_factory=dict)  # under the same names
    too_late: str = ""  # what did not happen at all


def slack() -> float:
    """By how much a machine that does other things as well may be late."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wrong(told: Told, bars: Bars, slack: float) -> tuple[str, ...]:
    """What is not as it should be, a sentence each."""
    if told.too_late:
        return (told.too_late,)
    sentences = []
    for name, unit in (("noticed_s", " s"), ("again_s", " s"), ("ended_s", " s"), ("gone_s", " s"), ("steps_lost", "")):
        bar, value = getattr(bars, name), getattr(told, name)
        if bar is not None and value is not None and value > bar * (slack if unit else 1):
            sentences.append(f"{name} is {value:.2f}{unit}, allowed are {bar}{unit} (slack {slack:.1f})")
    if told.orphans:
        sentences.append(f"{told.orphans} processes are left")
    for name, value in told.expected.items():
        if told.found.get(name) != value:
            sentences.append(f"{name}: expected {value}, found {told.found.get(name)}")
    return tuple(sentences)
