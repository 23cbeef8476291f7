"""``history.csv``: the metrics of a node's training over time, one row every few seconds. ddprun writes it.

A row has the Unix time and one column per series. A column combines the values of the node's ranks: the sum of
counters, and the largest value of gauges. The name of a column is the metric's name, or the metric's name and the value
of its label, as in ``ddp_step_phase_seconds_total:data``. A series without a sample has an empty cell. When there are
``MAX_ROWS`` rows, every other row is removed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ddpwire import metrics
from ddpwire.events import is_time

HISTORY = "history.csv"
MAX_ROWS = 1200
TIME = "time"
_KEPT = (
    metrics.LAST_STEP,
    metrics.STEPS_PLANNED,
    metrics.EPOCH,
    metrics.SAMPLES,
    metrics.LOSS,
    metrics.EVAL_ACCURACY,
    metrics.LEARNING_RATE,
    metrics.GRAD_NORM,
    metrics.STEP_PHASE,
    metrics.PRODUCTIVE,
    metrics.UNPRODUCTIVE,
    metrics.STRAGGLER_SKEW,
    metrics.CHECKPOINT_LAST_STEP,
    metrics.DEVICE_MEMORY,
    metrics.RANKS_ALIVE,
    metrics.RESTARTS,
    metrics.STEPS_LOST,
    metrics.DEVICE_UTILIZATION,
)

Row = Mapping[str, float]
# The label whose values have a column each; None if the metric has one column.
_LABELS = {metric.name: next((label for label, values in metric.labels.items() if values), None) for metric in _KEPT}
# The function that combines the values of a node's ranks, by the name of the column.
COLUMNS: Mapping[str, Callable[[Iterable[float]], float]] = {
    name: sum if metric.kind == "counter" else max
    for metric in _KEPT
    for name in [f"{metric.name}:{value}" for values in metric.labels.values() for value in values] or [metric.name]
}
HEADER = ",".join((TIME, *COLUMNS))


def fold(samples: Iterable[tuple[str, Mapping[str, str], float]]) -> Row:
    """Return a row from the samples of a node's ranks, without the columns that have no sample.

    A sample has the name of its metric, its labels and its value.
    """
    columns: dict[str, list[float]] = {}
    for name, labels, value in samples:
        if name in _LABELS:
            label = _LABELS[name]
            columns.setdefault(f"{name}:{labels.get(label, '')}" if label else name, []).append(value)
    return {name: combine(columns[name]) for name, combine in COLUMNS.items() if name in columns}


def line(time_s: float, row: Row) -> str:
    """Return a row as a line of the file."""
    cells = (f"{row[name]:.9g}" if name in row else "" for name in COLUMNS)
    return ",".join((f"{time_s:.1f}", *cells))


def read_history(text: str) -> tuple[Row, ...]:
    """Return the rows of a file, each with its ``time``. Skip invalid lines. The file may have any columns."""
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
