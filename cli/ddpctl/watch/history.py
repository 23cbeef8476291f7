"""Combines the histories of the nodes into the metrics of the run over time.

For a counter, the value of the run is the sum over the nodes. For a gauge, it is the maximum. If ddprun is started
again on a node, the counters of this node begin at 0 again.
"""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ddpwire import metrics
from ddpwire.history import TIME, Row

Line = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class History:
    """The rows of each node, ordered by time."""

    nodes: Mapping[int, Sequence[Row]]

    @property
    def begin(self) -> float:
        """The time of the first row, or 0 if there are no rows."""
        return min((rows[0][TIME] for rows in self.nodes.values() if rows), default=0.0)

    @property
    def end(self) -> float:
        """The time of the last row, or 0 if there are no rows."""
        return max((rows[-1][TIME] for rows in self.nodes.values() if rows), default=0.0)

    def moments(self, number: int) -> tuple[float, ...]:
        """Return evenly spaced times from the first row to the last.

        There are at most ``number`` times, and at most as many as the longest history of a node has rows.
        """
        number = min(number, max((len(rows) for rows in self.nodes.values()), default=0))
        if number < 2 or self.end <= self.begin:
            return ()
        step = (self.end - self.begin) / (number - 1)
        return tuple(self.begin + index * step for index in range(number))

    def gauge(self, name: str, moments: Sequence[float]) -> Line:
        """Return the maximum over the nodes at each moment. Before the first value, the maximum is None."""
        lines = [_held(rows, name, moments) for rows in self.nodes.values()]
        known = ([value for value in values if value is not None] for values in zip(*lines, strict=True))
        return tuple(max(values, default=None) for values in known)

    def rate(self, name: str, moments: Sequence[float]) -> Line:
        """Return the rate per second of a counter, summed over the nodes, between each moment and the next.

        The counter is interpolated between two rows. Without this, a moment just before a row and a moment just after
        it would give very different rates.
        """
        lines = [pairwise(_counted(rows, name, moments)) for rows in self.nodes.values()]
        rates: list[float | None] = []
        for (begin, end), counts in zip(pairwise(moments), zip(*lines, strict=True), strict=bool(lines)):
            grown = [after - (before or 0.0) for before, after in counts if after is not None]
            rates.append(sum(grown) / (end - begin) if grown else None)
        return tuple(rates)

    def total(self, name: str) -> float:
        """Return the last value of a series, summed over the nodes."""
        return sum(self._lasts(name))

    @property
    def goodput(self) -> float | None:
        """The goodput of the run (see ddpwire.metrics.goodput), or None before the first step."""
        columns = {column for rows in self.nodes.values() for row in rows for column in row}
        lost = (column for column in columns if column.startswith(f"{metrics.UNPRODUCTIVE.name}:"))
        return metrics.goodput(self.total(metrics.PRODUCTIVE.name), sum(map(self.total, lost)))

    def last(self, name: str) -> float | None:
        """Return the maximum over the nodes of the last value of a series, or None if there is no value."""
        return max(self._lasts(name), default=None)

    def _lasts(self, name: str) -> list[float]:
        lasts = (next((row[name] for row in reversed(rows) if name in row), None) for rows in self.nodes.values())
        return [value for value in lasts if value is not None]

    def points(self, name: str) -> list[tuple[float, float]]:
        """Return the times and values of a series on all nodes, ordered by time."""
        return sorted((row[TIME], row[name]) for rows in self.nodes.values() for row in rows if name in row)


def _held(rows: Sequence[Row], name: str, moments: Sequence[float]) -> list[float | None]:
    known = [(row[TIME], row[name]) for row in rows if name in row and math.isfinite(row[name])]
    times = [time for time, _ in known]
    places = [bisect.bisect_right(times, moment + 1e-6) for moment in moments]
    return [known[place - 1][1] if place else None for place in places]


def _counted(rows: Sequence[Row], name: str, moments: Sequence[float]) -> list[float | None]:
    """Return the value of a counter at each moment, or None before its first value.

    Values between two rows are interpolated. If the counter restarts from 0, its earlier value is added.
    """
    known = [(row[TIME], row[name]) for row in rows if name in row and math.isfinite(row[name])]
    times = [time for time, _ in known]
    steps = (after - before if after >= before else after for (_, before), (_, after) in pairwise(known))
    grown = list(accumulate(steps, initial=known[0][1])) if known else []
    values: list[float | None] = []
    for moment in moments:
        place = bisect.bisect_right(times, moment + 1e-6)
        if place in (0, len(times)):
            values.append(grown[-1] if place else None)
        else:
            share = (moment - times[place - 1]) / (times[place] - times[place - 1])
            values.append(grown[place - 1] + max(0.0, share) * (grown[place] - grown[place - 1]))
    return values
