"""What ``ddpctl top`` shows, from what the nodes exported now and a little before. Pure.

A rank's own time of a step is its step without the time in which it waited for the others: by it, ranks that wait for
each other can be told apart.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpctl.run import RunStatus, State
from ddpctl.watch.reading import Reading
from ddpwire import catalogue
from ddpwire import rank_catalogue as of_ranks

SLOW, SLOW_S = 1.5, 0.005  # times the ranks' median, and more than it by: less is the noise of a machine
SILENT_S, SILENT_STEPS = 30.0, 10
# What a node says of itself, and what that is of a run; the first that any node says counts.
_STATES: tuple[tuple[str, State], ...] = (
    ("stopping", "stopping"),
    ("restarting", "rendezvous"),
    ("rendezvous", "rendezvous"),
    ("training", "training"),
)


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank, lately. None: it does not tell."""

    rank: int
    node: int
    step: int | None
    step_s: float | None
    own_s: float | None
    phases: Mapping[str, float]  # shares of a step, by the catalogue's phases; empty: it does not tell
    device_share: float | None  # in which the GPU computed, 0 to 1
    memory_bytes: float | None  # of the GPU, that torch holds
    slow: float | None = None  # a straggler: so many times the ranks' median
    silent_s: float | None = None  # it takes no step, for so long


@dataclass(frozen=True, kw_only=True)
class Overview:
    """A run at one moment. None: nobody tells."""

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
    goodput: float | None = None  # share of the time in which new steps were taken, 0 to 1
    restarts: int = 0
    steps_lost: int = 0
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    left_s: float | None = None
    ranks_alive: int = 0
    world_size: int | None = None
    ranks: tuple[RankRow, ...] = ()
    silent: tuple[str, ...] = ()  # nodes that do not answer, and why
    moments: tuple[float, ...] = ()  # of the run until now, to which the next two belong
    throughput: tuple[float | None, ...] = ()  # from the moment before
    losses: tuple[float | None, ...] = ()


def numbers(now: Sequence[Reading], before: Sequence[Reading]) -> dict[str, object]:
    """The fields of an overview that the nodes' metrics tell; ``before``: the same nodes a little earlier."""
    earlier = {reading.node: reading for reading in before}
    alive = sum(sum(reading.values(catalogue.RANKS_ALIVE.name)) for reading in now)
    saved = _largest(now, of_ranks.CHECKPOINT_LAST_SUCCESS.name)
    latest = max((reading.time for reading in now), default=0.0)
    productive = sum(sum(reading.values(of_ranks.PRODUCTIVE.name)) for reading in now)
    lost = sum(sum(reading.values(of_ranks.UNPRODUCTIVE.name)) for reading in now)
    restarts = (sum(reading.values(catalogue.RESTARTS.name)) for reading in now)
    again = (sum(reading.values(catalogue.STEPS_LOST.name)) for reading in now)
    return {
        "step": _whole(_largest(now, of_ranks.LAST_STEP.name)),
        "planned": _whole(_largest(now, of_ranks.STEPS_PLANNED.name)),
        "epoch": _whole(_largest(now, of_ranks.EPOCH.name)),
        "samples_per_s": _throughput(now, earlier),
        "loss": _largest(now, of_ranks.LOSS.name),
        "accuracy": _largest(now, of_ranks.EVAL_ACCURACY.name),
        "learning_rate": _largest(now, of_ranks.LEARNING_RATE.name),
        "goodput": productive / (productive + lost) if productive else None,
        "restarts": int(max(restarts, default=0)),  # every node counts all of them
        "steps_lost": int(max(again, default=0)),
        "checkpoint_step": _whole(_largest(now, of_ranks.CHECKPOINT_LAST_STEP.name)) if saved else None,
        "checkpoint_age_s": max(0.0, latest - saved) if saved else None,
        "ranks_alive": int(alive),
        "world_size": _whole(_largest(now, catalogue.WORLD_SIZE.name)),
        "ranks": rows(now, earlier),
    }


def state(now: Sequence[Reading]) -> State | None:
    """How far the slowest of the nodes is by its own word; None: none says that it runs."""
    said = {word for reading in now for word, on in reading.by("state", catalogue.JOB_STATE.name).items() if on}
    return next((state for word, state in _STATES if word in said), None)


def rows(now: Sequence[Reading], earlier: Mapping[int, Reading]) -> tuple[RankRow, ...]:
    """A row a rank, the stragglers marked."""
    found = [row for reading in now for row in _rows_of(reading, earlier.get(reading.node))]
    own = [row.own_s for row in found if row.own_s is not None]
    typical = statistics.median_low(own) if len(own) > 1 else None
    return tuple(sorted((_marked(row, typical) for row in found), key=lambda row: row.rank))


def _rows_of(now: Reading, before: Reading | None) -> list[RankRow]:
    steps = now.by("rank", of_ranks.LAST_STEP.name)
    counted = now.by("rank", of_ranks.STEPS.name)
    last = now.by("rank", of_ranks.LAST_STEP_TIME.name)
    memory = now.by("rank", of_ranks.DEVICE_MEMORY.name, kind="allocated")
    ranks = sorted(steps.keys() | counted.keys(), key=int)
    shares = sorted(now.by("device", catalogue.DEVICE_UTILIZATION.name).items(), key=lambda item: int(item[0]))
    devices = dict(zip(ranks, (share for _, share in shares), strict=True)) if len(shares) == len(ranks) else {}
    found = []
    for rank in ranks:
        step_s = _step_s(now, before, rank)
        phases = _phases(now, before, rank)
        silent_s = now.time - last[rank] if rank in last else 0.0
        waits = phases.get("comm_exposed", 0.0)
        found.append(
            RankRow(
                rank=int(rank),
                node=now.node,
                step=_whole(steps.get(rank)),
                step_s=step_s,
                own_s=step_s * (1 - waits) if step_s is not None and phases else None,
                phases=phases,
                device_share=devices.get(rank),
                memory_bytes=memory.get(rank),
                silent_s=silent_s if silent_s > max(SILENT_S, SILENT_STEPS * (step_s or 0.0)) else None,
            )
        )
    return found


def _marked(row: RankRow, typical: float | None) -> RankRow:
    if row.own_s is None or not typical or row.own_s < SLOW * typical or row.own_s - typical < SLOW_S:
        return row
    return RankRow(**{**vars(row), "slow": row.own_s / typical})


def _step_s(now: Reading, before: Reading | None, rank: str) -> float | None:
    """The mean time of the steps since ``before``, and where there were none of all."""
    name = of_ranks.STEP_DURATION.name
    for earlier in (before, None):
        seconds = _grown(now, earlier, f"{name}_sum", rank)
        number = _grown(now, earlier, f"{name}_count", rank)
        if number > 0:
            return seconds / number
    if before is not None and (number := _grown(now, before, of_ranks.STEPS.name, rank)) > 0:
        return (now.time - before.time) / number  # a script that counts its steps alone
    return None


def _phases(now: Reading, before: Reading | None, rank: str) -> dict[str, float]:
    for earlier in (before, None):
        grown = {phase: _grown(now, earlier, of_ranks.STEP_PHASE.name, rank, phase=phase)
                 for phase in of_ranks.STEP_PHASES}  # fmt: skip
        if (whole := sum(grown.values())) > 0:
            return {phase: seconds / whole for phase, seconds in grown.items()}
    return {}


def _grown(now: Reading, before: Reading | None, name: str, rank: str, **labels: str) -> float:
    """What a rank's counter grew by; of one that was begun anew, all of it."""
    after = now.by("rank", name, **labels).get(rank, 0.0)
    earlier = before.by("rank", name, **labels).get(rank, 0.0) if before else 0.0
    return after - earlier if after >= earlier else after


def _throughput(now: Sequence[Reading], earlier: Mapping[int, Reading]) -> float | None:
    name, found = of_ranks.SAMPLES.name, []
    for reading in now:
        before = earlier.get(reading.node)
        if before is not None and reading.time > before.time:
            ranks = reading.by("rank", name)
            found.append(sum(_grown(reading, before, name, rank) for rank in ranks) / (reading.time - before.time))
    return sum(found) if found else None


def _largest(readings: Sequence[Reading], name: str) -> float | None:
    return max((value for reading in readings for value in reading.values(name)), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def nothing_told(status: RunStatus, time: float) -> Overview:
    """Of a run that exports nothing: it has not begun, or has ended."""
    return Overview(run=status.run, state=status.state, message=status.message, code=status.code, time=time)
