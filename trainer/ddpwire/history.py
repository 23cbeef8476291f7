"""``history.csv``: the course of a node's training, with one row every few seconds. ddprun writes it.

A row has the Unix time and one column per series of the catalogue, combined over the node's ranks: counters are summed,
and the largest value of a gauge is kept. A column has the name of its series, followed by a colon and the value of its
label: ``ddp_step_phase_seconds_total:data``. A series without a sample has an empty cell. In a long run, rows are
removed evenly, so that there are never more than ``MAX_ROWS``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddpwire import metrics
from ddpwire import metrics as of_ranks
from ddpwire.events import is_time
from ddpwire.metrics import Metric

HISTORY = "history.csv"
MAX_ROWS = 1200
TIME = "time"
_KEPT = (
    of_ranks.LAST_STEP,
    of_ranks.STEPS_PLANNED,
    of_ranks.EPOCH,
    of_ranks.SAMPLES,
    of_ranks.LOSS,
    of_ranks.EVAL_ACCURACY,
    of_ranks.LEARNING_RATE,
    of_ranks.GRAD_NORM,
    of_ranks.STEP_PHASE,
    of_ranks.PRODUCTIVE,
    of_ranks.UNPRODUCTIVE,
    of_ranks.STRAGGLER_SKEW,
    of_ranks.CHECKPOINT_LAST_STEP,
    of_ranks.DEVICE_MEMORY,
    metrics.RANKS_ALIVE,
    metrics.RESTARTS,
    metrics.STEPS_LOST,
    metrics.DEVICE_UTILIZATION,
)

Sample = tuple[str, Mapping[str, str], float]  # the series' name, its labels, its value
Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column, and how the samples of a node's ranks are combined into its value."""

    name: str
    fold: Callable[[Iterable[float]], float]


def _columns(metric: Metric) -> tuple[Column, ...]:
    fold: Callable[[Iterable[float]], float] = sum if metric.kind == "counter" else max
    values = next((values for values in metric.labels.values() if values), ())
    names = [f"{metric.name}:{value}" for value in values] or [metric.name]
    return tuple(Column(name=name, fold=fold) for name in names)


COLUMNS: tuple[Column, ...] = tuple(column for metric in _KEPT for column in _columns(metric))
HEADER = ",".join((TIME, *(column.name for column in COLUMNS)))
_LABELS = {metric.name: next((label for label, values in metric.labels.items() if values), None) for metric in _KEPT}


def fold(samples: Iterable[Sample]) -> Row:
    """Return a row from the samples of a node's ranks; columns without a sample are left out."""
    found: dict[str, list[float]] = {}
    for name, labels, value in samples:
        if name in _LABELS:
            label = _LABELS[name]
            found.setdefault(f"{name}:{labels.get(label, '')}" if label else name, []).append(value)
    return {column.name: column.fold(found[column.name]) for column in COLUMNS if column.name in found}


def line(time_s: float, row: Row) -> str:
    """Return a row as a line of the file."""
    cells = (f"{row[column.name]:.9g}" if column.name in row else "" for column in COLUMNS)
    return ",".join((f"{time_s:.1f}", *cells))


def read_history(text: str) -> tuple[Row, ...]:
    """Return the rows of a file, each with its ``time``. Accepts files of other versions; skips invalid lines."""
    head, *lines = text.split("\n")
    names = head.strip().split(",")
    return tuple(row for line in lines if (row := _row(names, line)))


def strange_rows(text: str) -> int:
    """Return how many lines of a file are not rows. The last line, which may be incomplete, is not counted."""
    head, *lines = text.split("\n")
    return sum(1 for line in lines[:-1] if line.strip() and _row(head.strip().split(","), line) is None)


def _row(names: Sequence[str], line: str) -> Row | None:
    cells = line.strip().split(",")
    try:
        row = {name: float(cell) for name, cell in zip(names, cells, strict=False) if name and cell}
    except ValueError:
        return None
    return row if is_time(row.get(TIME)) else None
