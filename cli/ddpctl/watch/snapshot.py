"""Computes what ``ddpctl top`` shows: the state and the speed of a run, from two scrapes of its nodes' metrics.

A rank's own step time is the duration of a step without the time in which the rank waits for other ranks. A slow rank
has a long own step time, and a rank that waits for a slow rank has a short one.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpctl.errors import UnavailableError
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import ORDER, RunStatus, State
from ddpctl.runs.run_store import Run
from ddpctl.watch.history import History
from ddpwire import metrics as of_ranks
from ddpwire.history import HISTORY, TIME, Row, fold, read_history
from ddpwire.metrics import STRAGGLER_RATIO, STRAGGLER_S

SILENT_S, SILENT_STEPS = 30.0, 10
WINDOW_S = 10.0  # the speed of the ranks is measured over this time
ASK_EVERY_S, ASK_AGAIN_S = 15.0, 3.0  # time between two status requests, if the nodes answer and if they do not
NUM_POINTS = 60


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The samples of one node, keyed by the name of the series. Each sample consists of its labels and its value."""

    node: int
    time: float  # the node's clock, in seconds since the epoch
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]] = field(default_factory=dict)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the values of a series, keyed by the value of ``label``. Samples without ``labels`` are left out."""
        return {
            present[label]: value
            for present, value in self.samples.get(name, ())
            if label in present and present.items() >= labels.items()
        }

    def values(self, name: str) -> list[float]:
        """Return the values of a series."""
        return [value for _, value in self.samples.get(name, ())]

    @property
    def row(self) -> Row:
        """The row that these samples are in the history of the node."""
        samples = ((name, labels, value) for name, pairs in self.samples.items() for labels, value in pairs)
        return {TIME: self.time, **fold(samples)}


def read_metrics(answer: ProbeResult) -> Reading | None:
    """Parse the metrics of a node. Return None if they are missing or damaged."""
    from prometheus_client.parser import text_string_to_metric_families

    if not answer.metrics or answer.time is None:
        return None
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(answer.metrics):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except (ValueError, KeyError, IndexError):
        return None  # the text is incomplete, or is not in the format of Prometheus
    return Reading(
        node=answer.node, time=answer.time, samples={name: tuple(values) for name, values in samples.items()}
    )


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """The speed of one rank in the last few seconds. An unknown value is None."""

    rank: int
    node: int
    step: int | None
    step_s: float | None
    own_s: float | None
    phases: Mapping[str, float]  # shares of a step, keyed by ddpwire.metrics.STEP_PHASES; empty if not reported
    device_share: float | None  # share of the time in which the GPU is busy, 0 to 1
    memory_bytes: float | None  # GPU memory that torch has allocated
    slow: float | None = None  # for a straggler: its own step time divided by the median of the ranks
    silent_s: float | None = None  # seconds since the last step, if this is unusually long


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment. A value that no node reports is None."""

    run: str
    state: State
    message: str
    code: int | None
    time: float
    step: int | None = None
    planned: int | None = None
    epoch: int | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    learning_rate: float | None = None
    goodput: float | None = None  # ddpwire.metrics.goodput
    restarts: int = 0
    steps_lost: int = 0
    checkpoint_step: int | None = None  # 0 if there is no checkpoint yet
    checkpoint_age_s: float | None = None
    left_s: float | None = None
    ranks_alive: int = 0
    world_size: int | None = None
    ranks: tuple[RankRow, ...] = ()
    silent: tuple[str, ...] = ()  # a message for each node that does not answer
    moments: tuple[float, ...] = ()  # times since the run's start; the next two fields have a value for each
    throughput: tuple[float | None, ...] = ()  # samples per second since the previous moment
    losses: tuple[float | None, ...] = ()


def numbers(now: Sequence[Reading], before: Sequence[Reading]) -> dict[str, object]:
    """Compute the fields of Snapshot that depend on metrics. ``before`` are earlier readings of the same nodes."""
    earlier = {reading.node: reading for reading in before}
    latest = max((reading.time for reading in now), default=0.0)
    saved = _largest(now, of_ranks.CHECKPOINT_LAST_SUCCESS.name)  # 0: no checkpoint yet; None: not reported
    saved_step = _largest(now, of_ranks.CHECKPOINT_LAST_STEP.name) if saved else saved
    return {
        **last_numbers(History(nodes={reading.node: (reading.row,) for reading in now})),
        "samples_per_s": _throughput(now, earlier),
        "checkpoint_step": _whole(saved_step),
        "checkpoint_age_s": max(0.0, latest - saved) if saved else None,
        "ranks_alive": int(sum(value for reading in now for value in reading.values(of_ranks.RANKS_ALIVE.name))),
        "world_size": _whole(_largest(now, of_ranks.WORLD_SIZE.name)),
        "ranks": rows(now, earlier),
    }


def last_numbers(history: History) -> dict[str, object]:
    """Compute the fields of Snapshot that are the last values in a history: of a whole one, or of its last rows."""
    return {
        "step": _whole(history.last(of_ranks.LAST_STEP.name)),
        "planned": _whole(history.last(of_ranks.STEPS_PLANNED.name)),
        "epoch": _whole(history.last(of_ranks.EPOCH.name)),
        "loss": history.last(of_ranks.LOSS.name),
        "accuracy": history.last(f"{of_ranks.EVAL_ACCURACY.name}:test"),
        "learning_rate": history.last(of_ranks.LEARNING_RATE.name),
        "goodput": history.goodput,
        "restarts": _counted(history, of_ranks.RESTARTS.name),
        "steps_lost": _counted(history, of_ranks.STEPS_LOST.name),
    }


def state(now: Sequence[Reading]) -> State | None:
    """Return the state of the run, or None if no node reports a state in ``ORDER``."""
    own = {state for reading in now for state, on in reading.by("state", of_ranks.JOB_STATE.name).items() if on}
    states = {"rendezvous" if state == "restarting" else state for state in own}
    return next((state for state in ORDER if state in states), None)


def rows(now: Sequence[Reading], earlier: Mapping[int, Reading]) -> tuple[RankRow, ...]:
    """Return a row for each rank. Rows of stragglers have a value in ``slow``."""
    ranks = [row for reading in now for row in _rows_of(reading, earlier.get(reading.node))]
    own = [row.own_s for row in ranks if row.own_s is not None]
    if typical := statistics.median_low(own) if len(own) > 1 else None:
        slowest = max(STRAGGLER_RATIO * typical, typical + STRAGGLER_S)
        ranks = [replace(row, slow=row.own_s / typical) if row.own_s and row.own_s >= slowest else row for row in ranks]
    return tuple(sorted(ranks, key=lambda row: row.rank))


def _rows_of(now: Reading, before: Reading | None) -> list[RankRow]:
    steps = now.by("rank", of_ranks.LAST_STEP.name)
    counted = now.by("rank", of_ranks.STEPS.name)
    last = now.by("rank", of_ranks.LAST_STEP_TIME.name)
    memory = now.by("rank", of_ranks.DEVICE_MEMORY.name, kind="allocated")
    ranks = sorted(steps.keys() | counted.keys(), key=int)
    # No series has both the rank and the GPU. The GPU of a rank is known only if the node has one rank and one GPU.
    gpus = now.by("device", of_ranks.DEVICE_MEMORY_USED.name).keys()
    shares = now.by("device", of_ranks.DEVICE_UTILIZATION.name)
    share = shares.get(next(iter(gpus))) if len(gpus) == len(ranks) == len(memory) == 1 else None
    rows_of_node = []
    for rank in ranks:
        step_s = _step_s(now, before, rank)
        phases = _phases(now, before, rank)
        silent_s = now.time - last[rank] if rank in last else 0.0
        waits = phases.get("comm_exposed", 0.0)
        rows_of_node.append(
            RankRow(
                rank=int(rank),
                node=now.node,
                step=_whole(steps.get(rank)),
                step_s=step_s,
                own_s=step_s * (1 - waits) if step_s is not None and phases else None,
                phases=phases,
                device_share=share,
                memory_bytes=memory.get(rank),
                silent_s=silent_s if silent_s > max(SILENT_S, SILENT_STEPS * (step_s or 0.0)) else None,
            )
        )
    return rows_of_node


def _step_s(now: Reading, before: Reading | None, rank: str) -> float | None:
    """Return the mean duration of the steps since ``before``. If no step has ended since, use all steps."""
    name = of_ranks.STEP_DURATION.name
    for earlier in (before, None):
        seconds = _grown(now, earlier, f"{name}_sum", rank)
        number = _grown(now, earlier, f"{name}_count", rank)
        if number > 0:
            return seconds / number
    if before is not None and (number := _grown(now, before, of_ranks.STEPS.name, rank)) > 0:
        return (now.time - before.time) / number  # the script reports only the number of steps
    return None


def _phases(now: Reading, before: Reading | None, rank: str) -> dict[str, float]:
    for earlier in (before, None):
        name = of_ranks.STEP_PHASE.name
        grown = {phase: _grown(now, earlier, name, rank, phase=phase)
                 for phase in of_ranks.STEP_PHASES if rank in now.by("rank", name, phase=phase)}  # fmt: skip
        if (whole := sum(grown.values())) > 0:
            return {phase: seconds / whole for phase, seconds in grown.items()}
    return {}


def _grown(now: Reading, before: Reading | None, name: str, rank: str, **labels: str) -> float:
    """Return the increase of a rank's counter since ``before``. If the counter was reset, return its new value."""
    after = now.by("rank", name, **labels).get(rank, 0.0)
    earlier = before.by("rank", name, **labels).get(rank, 0.0) if before else 0.0
    return after - earlier if after >= earlier else after


def _throughput(now: Sequence[Reading], earlier: Mapping[int, Reading]) -> float | None:
    name, rates = of_ranks.SAMPLES.name, []
    for reading in now:
        before, ranks = earlier.get(reading.node), reading.by("rank", name)
        if before is not None and reading.time > before.time and any(ranks.values()):  # a script may report no samples
            rates += [_grown(reading, before, name, rank) / _stepping_s(reading, before, rank) for rank in ranks]
    return sum(rates) if rates else None


def _stepping_s(now: Reading, before: Reading, rank: str) -> float:
    """Return the seconds from a rank's last step in ``before`` to its last step in ``now``.

    If more time than that has passed since the rank's last step, return the seconds since its last step instead. If no
    step ended between the readings, return the seconds between the readings.
    """
    ends = [reading.by("rank", of_ranks.LAST_STEP_TIME.name).get(rank) for reading in (before, now)]
    if ends[0] is None or ends[1] is None or ends[1] <= ends[0]:
        return now.time - before.time
    return max(ends[1] - ends[0], now.time - ends[1])


def _largest(readings: Sequence[Reading], name: str) -> float | None:
    return max((value for reading in readings for value in reading.values(name)), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def empty_snapshot(status: RunStatus, time: float) -> Snapshot:
    """Return a snapshot without metrics."""
    return Snapshot(run=status.run, state=status.state, message=status.message, code=status.code, time=time)


# The watcher reads the histories of the nodes once, and then adds the metrics that it reads. It rarely asks the target
# for the status of the run, because many users may share the server of the target.


class Watcher:
    """Takes snapshots of one run, and keeps the metrics between the snapshots."""

    def __init__(self, context: AppContext, run: Run) -> None:
        self._context, self._run = context, run
        self._status: RunStatus | None = None
        self._asked_at = 0.0
        self._rows: dict[int, list[Row]] | None = None  # the history of each node, or None before the first probe
        self._window: deque[tuple[float, tuple[Reading, ...]]] = deque()
        self._last: Snapshot | None = None

    def probe(self) -> Snapshot:
        """Take a snapshot. If the target does not answer, return the previous snapshot.

        Raises DdpctlError if there is no previous snapshot.
        """
        try:
            status = self._ask(again=False)
            answers = () if status.ended else self._probe_nodes(metrics=True)
            readings = tuple(reading for answer in answers if (reading := read_metrics(answer)))
            if not readings and not status.ended:
                status = self._ask(again=True)
            self._last = self._after_the_end(status) if status.ended else self._snapshot(status, answers, readings)
        except UnavailableError as error:  # the network may fail for a short time
            if self._last is None:
                raise
            return replace(self._last, silent=(f"the values are not up to date ({error})",))
        return self._last

    def _ask(self, *, again: bool) -> RunStatus:
        now = time.monotonic()
        if self._status is None or now - self._asked_at > (ASK_AGAIN_S if again else ASK_EVERY_S):
            (self._status,) = launcher.status(self._context, (self._run,))
            self._asked_at = now
        return self._status

    def _probe_nodes(self, *, metrics: bool) -> tuple[ProbeResult, ...]:
        files = (HISTORY,) if self._rows is None or not metrics else ()
        answers = launcher.probe(self._context, self._run, Probe(metrics=metrics, files=files))
        if files:
            self._rows = {answer.node: list(read_history(answer.files.get(HISTORY, ""))) for answer in answers}
        return answers

    def _snapshot(self, status: RunStatus, answers: Sequence[ProbeResult], readings: tuple[Reading, ...]) -> Snapshot:
        now = max((answer.time for answer in answers if answer.time is not None), default=time.time())
        assert self._rows is not None, "the first probe reads the histories"  # noqa: S101
        for reading in readings:
            self._rows.setdefault(reading.node, []).append(reading.row)
        values = numbers(readings, self._before(readings))
        fresh = state(readings) or status.state  # newer than the status from the target
        answered = {reading.node for reading in readings}
        values["silent"] = tuple(
            f"node {answer.node}: {answer.failure}"
            for answer in answers
            if answer.node not in answered and answer.failure and readings
        )
        values["state"] = "running" if fresh == "training" and values["step"] is None else fresh
        return self._with_history(replace(empty_snapshot(status, now), **values))  # type: ignore[arg-type]

    def _after_the_end(self, status: RunStatus) -> Snapshot:
        self._probe_nodes(metrics=False)
        history = History(nodes=self._rows or {})
        snapshot = replace(empty_snapshot(status, history.end or time.time()), **last_numbers(history))  # type: ignore[arg-type]
        return replace(self._with_history(snapshot), left_s=None)

    def _before(self, readings: tuple[Reading, ...]) -> tuple[Reading, ...]:
        """Return the readings of about ``WINDOW_S`` ago, or of longer ago if no step has ended since."""
        now, step = time.monotonic(), _largest(readings, of_ranks.LAST_STEP.name)
        self._window.append((now, readings))
        while len(self._window) > 2 and now - self._window[1][0] >= WINDOW_S:
            if step is not None and step == _largest(self._window[1][1], of_ranks.LAST_STEP.name):
                break
            self._window.popleft()
        return self._window[0][1] if len(self._window) > 1 else ()

    def _with_history(self, snapshot: Snapshot) -> Snapshot:
        history = History(nodes=self._rows or {})
        moments = history.moments(NUM_POINTS)
        return replace(
            snapshot,
            moments=moments,
            throughput=(None, *history.rate(of_ranks.SAMPLES.name, moments)) if moments else (),
            losses=history.gauge(of_ranks.LOSS.name, moments),
            left_s=time_left_s(history, snapshot),
        )


def time_left_s(history: History, snapshot: Snapshot) -> float | None:
    """Estimate the remaining seconds from the average time of a step so far. Time in a queue is not counted."""
    steps = history.points(of_ranks.LAST_STEP.name)
    if not steps or snapshot.step is None or snapshot.planned is None:
        return None

    def most(rows: Sequence[Row], name: str) -> float:
        return max((row.get(name, 0.0) for row in rows), default=0.0)

    name, alive = f"{of_ranks.UNPRODUCTIVE.name}:requeue", of_ranks.RANKS_ALIVE.name
    waits_s = (most(rows, name) / ranks for rows in history.nodes.values() if (ranks := most(rows, alive)))
    begin, first = steps[0]
    passed_s, taken = snapshot.time - begin - max(waits_s, default=0.0), snapshot.step - first
    return max(0, snapshot.planned - snapshot.step) * passed_s / taken if passed_s > 0 and taken > 0 else None


def _counted(history: History, name: str) -> int:
    """Return a counter of the run, summed over its labels.

    The counter of each node covers the whole run, so the result is the highest value, not the sum over the nodes.
    """
    counters = [{key: value for row in rows for key, value in row.items() if key.partition(":")[0] == name}
             for rows in history.nodes.values()]  # fmt: skip
    return int(max((sum(last.values()) for last in counters), default=0))
