"""The effects of a fault on a training, and whether they are as expected. Nothing here has a side effect."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The limits of a row of the table. None means no limit."""

    noticed_s: float | None = None
    again_s: float | None = None  # until all ranks have made a step again
    ended_s: float | None = None  # until the last node's launcher has ended
    steps_lost: int | None = None
    gone_s: float = 2.0  # until nothing is left of what was to end


@dataclass(frozen=True, kw_only=True)
class Result:
    """The observed effects of one fault. Times count from the fault."""

    noticed_s: float | None = None  # until every launcher that lives has said so
    again_s: float | None = None
    ended_s: float | None = None
    steps_lost: int | None = None
    gone_s: float | None = None
    orphans: int = 0  # processes left at the end
    expected: dict[str, object] = field(default_factory=dict)
    found: dict[str, object] = field(default_factory=dict)  # under the same names
    timed_out: str = ""  # what did not happen at all


def violations(result: Result, bars: Bars, *, timed: bool) -> tuple[str, ...]:
    """Return a sentence for each value that is not as expected.

    If ``timed`` is true, also compare the durations. Tests do not, because durations are longer on a busy machine.
    """
    if result.timed_out:
        return (result.timed_out,)
    sentences = []
    for name in ("noticed_s", "again_s", "ended_s", "gone_s") if timed else ():
        bar, value = getattr(bars, name), getattr(result, name)
        if bar is not None and (value is None or value > bar):
            sentences.append(f"{name} is {'unknown' if value is None else f'{value:.2f} s'}, allowed are {bar} s")
    if bars.steps_lost is not None and (result.steps_lost is None or result.steps_lost > bars.steps_lost):
        sentences.append(f"steps lost: {result.steps_lost}, allowed are {bars.steps_lost}")
    if result.orphans:
        sentences.append(f"{result.orphans} processes are left")
    for name, value in result.expected.items():
        if result.found.get(name) != value:
            sentences.append(f"{name}: expected {value}, found {result.found.get(name)}")
    return tuple(sentences)
