"""What there is to be known of a run when one looks back at it: asked once of its nodes, then values."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from ddpctl import launch
from ddpctl.desk import Desk
from ddpctl.look import Look, Seen
from ddpctl.run import Run, RunStatus
from ddpctl.watch.course import Course
from ddpctl.watch.phases import Span, spans
from ddpwire.events import EVENTS, EVENTS_BEFORE, Event, read_events, strange_lines
from ddpwire.folder import ENVIRONMENT, NODE_LOG, rank_log
from ddpwire.history import HISTORY, read_history, strange_rows

LOG_BYTES = 20_000
QUEUES = ("slurm", "kubernetes")


@dataclass(frozen=True, kw_only=True)
class Material:
    """A run, looked back at."""

    run: Run
    status: RunStatus
    now: float  # when it was looked at, in seconds since the epoch
    events: tuple[Event, ...]
    course: Course
    spans: tuple[Span, ...]
    environments: Mapping[int, Mapping[str, str]]  # by node: what it had
    said: str = ""  # the last lines of the rank that failed first, else of its node
    said_by: str = ""
    silent: tuple[str, ...] = ()  # nodes that could not be asked, and why
    torn: tuple[str, ...] = ()  # what of their files could not be read


def gather(desk: Desk, run: Run) -> Material:
    """Ask the run's target. Raises DdpctlError where nobody can be asked at all."""
    (status,) = launch.status(desk, (run,))
    look = Look(metrics=False, files=(HISTORY, EVENTS_BEFORE, EVENTS, ENVIRONMENT), placed=True)
    seen = _see(desk, run, look)
    course = Course(nodes={one.node: read_history(one.files.get(HISTORY, "")) for one in seen})
    events = read_events(*(one.files.get(name, "") for one in seen for name in (EVENTS_BEFORE, EVENTS)))
    placed = max((one.placed for one in seen if one.placed), default=None)
    now = time.time()
    said_by, said = _last_words(desk, run, status)
    return Material(
        run=run,
        status=status,
        now=now,
        events=events,
        course=course,
        spans=()
        if status.ended and not events  # nobody knows: of another version, or lost with its machine
        else spans(
            events,
            created=run.created,
            placed=placed,
            queued=run.kind in QUEUES,
            now=now,
            nodes=run.job.max_nodes,
            course=course,
        ),
        environments={one.node: _environment(one) for one in seen if ENVIRONMENT in one.files},
        said=said,
        said_by=said_by,
        silent=tuple(f"node {one.node}: {one.failure}" for one in seen if one.failure),
        torn=tuple(line for one in seen for line in _torn(one)),
    )


def _see(desk: Desk, run: Run, look: Look) -> tuple[Seen, ...]:
    return desk.runner.perform(launch.target_of(run).look(run, look))


def _last_words(desk: Desk, run: Run, status: RunStatus) -> tuple[str, str]:
    """Who is to be heard of a run that went wrong, and what they said last."""
    outcome = status.outcome
    if status.state not in ("failed", "lost"):
        return "", ""
    node = (outcome.node if outcome else None) or 0
    names = (NODE_LOG,) if outcome is None or outcome.rank is None else (rank_log(outcome.rank), NODE_LOG)
    seen = next((one for one in _see(desk, run, Look(metrics=False, files=names, max_bytes=LOG_BYTES))
                 if one.node == node), None)  # fmt: skip
    found = next((name for name in names if seen and seen.files.get(name, "").strip()), None)
    if seen is None or found is None:
        return "", ""
    who = f"rank {outcome.rank} on node {node}" if outcome and found != NODE_LOG else f"node {node}"
    return who, seen.files[found]


def _torn(seen: Seen) -> list[str]:
    counts = {name: strange_lines(seen.files.get(name, "")) for name in (EVENTS_BEFORE, EVENTS)}
    counts[HISTORY] = strange_rows(seen.files.get(HISTORY, ""))
    return [
        f"node {seen.node}: passed over what cannot be read of {name}, {count} line{'s' * (count > 1)}"
        for name, count in counts.items()
        if count
    ]


def _environment(seen: Seen) -> Mapping[str, str]:
    with suppress(ValueError, AttributeError, RecursionError):
        return {str(key): str(value) for key, value in json.loads(seen.files[ENVIRONMENT]).items()}
    return {}
