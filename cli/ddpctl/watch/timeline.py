"""Computes how the time of a run was spent, as a list of phases, and selects the events that matter to a user.

A phase lasts until the last node has left it. After a failure, the run is in the phase ``lost``. This phase begins with
the last step before the failure, and ends when the ranks have reached that step again. If a queue starts a run again,
each start has its own phases. Between two starts, the phase is ``queue``.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from ddpctl import targets
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs.run_status import RunStatus, State
from ddpctl.runs.run_store import Run
from ddpctl.watch.history import History
from ddpwire import metrics as of_ranks
from ddpwire.events import EVENTS, EVENTS_BEFORE, Event, is_time, read_events, strange_lines
from ddpwire.history import HISTORY, TIME, read_history, strange_rows
from ddpwire.run_files import ENVIRONMENT, NODE_LOG, rank_log

PHASES = (
    "queue",  # until the target has given the run its machines or, if this is unknown, until its nodes have started
    "start",  # the nodes start: images are pulled, containers are created
    "preflight",
    "rendezvous",
    "import",  # includes everything that the ranks do before their first step
    "restore",
    "first step",
    "training",
    "evaluation",
    "checkpoints",  # the time in which the training loop waits for checkpoints
    "running",  # the training, if the script does not report its steps
    "lost",
    "end",
)

# The phase that begins when all nodes have reported the event.
_NEXT = {
    "node_started": "preflight",
    "preflight_done": "rendezvous",
    "rendezvous_done": "import",
    "training_began": "first step",
    "first_step": "training",
}
GOING: tuple[State, ...] = ("starting", "rendezvous", "running", "training", "stopping")
WAITING: tuple[State, ...] = ("pending", "starting", "suspended")
LOG_BYTES = 20_000
EVENT_KINDS = (
    "node_started", "failed", "recovered", "straggler", "straggler_gone", "signal", "stopping", "checkpoint_failed",
    "took_place", "resumed_apart",
)  # fmt: skip
OF_NODES = (*_NEXT, "ranks_started", "node_ended")  # events that a node reports about itself
Placed = Mapping[int, Sequence[float]]  # the times at which each node got a machine, in seconds since the epoch
PLACE_S = 2.0  # tolerance, because a queue may report whole seconds of another clock
BAD = ("failed", "checkpoint_failed", "resumed_apart")
OF_ALL = ("node_started", "failed", "recovered", "signal", "stopping")  # every node or every rank reports these events
SAME_S = 60.0  # nodes report the same event within this time


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period in which the run was in one phase. Times are in seconds since the epoch."""

    phase: str
    begin: float
    end: float


@dataclass(kw_only=True)
class _Clock:
    phase: str
    since: float
    spans: list[Span] = field(default_factory=list)

    def turn(self, phase: str, at: float) -> None:
        """Begin a phase at the time ``at``, or at the beginning of the current phase if ``at`` is earlier."""
        at = max(at, self.since)
        if at > self.since:
            self.spans.append(Span(phase=self.phase, begin=self.since, end=at))
        self.phase, self.since = phase, at


def phase_spans(
    events: Sequence[Event], run: Run, state: State, *, placed: Placed, now: float, history: History
) -> tuple[Span, ...]:
    """Return the spans of the run in order.

    ``placed`` has the times at which each node got a machine, if they are known. If the run is active, the spans end at
    ``now``. Otherwise they end at the last event or metric.
    """
    spans: list[Span] = []
    since, starts, queued = run.created, split_starts(events, placed), "queue" in targets.capabilities(run.kind)
    times = sorted({time for node in placed.values() for time in node})
    for start, following in pairwise((*starts, ())):
        first = {event.node: event.time for event in reversed(start) if event.event == "node_started"}
        latest = min(first.values(), default=now) + PLACE_S  # a later time belongs to a later start
        places = [place for place in times if since - PLACE_S <= place <= latest]
        clock = _Clock(phase="queue" if queued or spans else "start", since=since)
        if places:
            clock.turn("start", places[-1])
        _follow(clock, start, nodes=run.job.max_nodes, history=history, again=bool(spans))
        since = max(clock.since, _last_sign(start, history, following[0].time if following else now))
        if not following and state in GOING and (state == "stopping" or not _is_over(start, placed)):
            since = now
        clock.turn("end", since)
        spans += _cut(clock.spans, _within(start))
    if state in WAITING and since < now:
        place = max((place for place in times if place > since - (0 if spans else PLACE_S)), default=now)
        clock = _Clock(phase="queue" if queued or spans else "start", since=since)
        clock.turn("start", place)
        clock.turn("end", now)
        spans += clock.spans
    return tuple(spans)


def split_starts(events: Sequence[Event], placed: Placed) -> list[Sequence[Event]]:
    """Split the events into groups, one group for each start of the run.

    A single node that starts again while the other nodes go on does not begin a new group.
    """
    starts: list[list[Event]] = []
    for index, event in enumerate(events):
        current = starts[-1] if starts else []
        if not starts or (
            event.event == "node_started"
            and any(earlier.node == event.node for earlier in current if earlier.event in OF_NODES)
            and _is_over(current, placed, events[index:])
        ):
            starts.append([])
        starts[-1].append(event)
    return list(starts)


def _is_over(start: Sequence[Event], placed: Placed, following: Sequence[Event] = ()) -> bool:
    """Return whether a start of the run is over.

    It is over if each of its nodes has ended, has started again in ``following``, or got another machine later.
    """
    last = {event.node: event for event in start if event.event in OF_NODES}
    then = {event.node: event.event for event in reversed(following) if event.event in OF_NODES}
    return bool(last) and all(
        then[node] == "node_started"
        if node in then
        else event.event == "node_ended" or any(place > event.time + PLACE_S for place in placed.get(node, ()))
        for node, event in last.items()
    )


def count_restarts(events: Sequence[Event], placed: Placed) -> int:
    """Return how often ddprun or the target started the ranks again."""
    starts = split_starts(events, placed)
    by_ddprun = 0
    for start in starts:
        latest = max((event.attempt for event in start if event.event == "ranks_started"), default=0)
        by_ddprun += len({event.attempt for event in start if event.event == "restart" and event.attempt < latest})
    return by_ddprun + max(0, len(starts) - 1)


def _last_sign(start: Sequence[Event], history: History, before: float) -> float:
    """Return the time at which the last node ended. ``start`` has the events of one start of the run.

    If a node has not reported its end, return the time of the last event or metric. Metrics after ``before`` are
    ignored.
    """
    ended = {event.node: event.time for event in start if event.event == "node_ended"}
    if ended.keys() >= {event.node for event in start if event.event in OF_NODES}:
        return max(ended.values(), default=0.0)
    rows = (row[TIME] for rows in history.nodes.values() for row in rows if row[TIME] <= before)
    return max(max((event.time for event in start), default=0.0), max(rows, default=0.0))


def _follow(clock: _Clock, events: Sequence[Event], *, nodes: int, history: History, again: bool) -> None:
    """Advance the clock through the phases of one start. ``again``: whether the run has an earlier start."""
    has_steps = any(event.event in ("first_step", "training_began") for event in events)
    following = _NEXT if has_steps else {**_NEXT, "ranks_started": "running"}
    reached: dict[str, set[int]] = {}
    present = len({event.node for event in events}) or nodes
    last = clock.since
    for event in events:
        if event.event == "node_started" and clock.phase not in ("queue", "start", "preflight", "lost"):
            clock.turn("lost", last)  # a node was started again
            reached.clear()
        last = max(last, event.time)
        if _is_loss(event, clock.phase):
            clock.turn("lost", max(_last_step(history, event.time), clock.since))
            reached.clear()
        elif _is_end(event, clock.phase):
            clock.turn("end", event.time)
        elif event.event in following:
            phase = following[event.event]
            reached.setdefault(event.event, set()).add(event.node)
            is_later = PHASES.index(phase) > PHASES.index(clock.phase)
            if clock.phase == "lost":
                is_later = phase in ("training", "running")
            if len(reached[event.event]) >= present and is_later:
                if event.event == "first_step" and (again or clock.phase == "lost"):
                    if clock.phase != "lost":
                        clock.turn("lost", event.time)  # until the run takes a step for the first time
                    clock.turn("training", _caught_up(history, event))
                else:
                    clock.turn(phase, event.time)


def phase_totals(spans: Iterable[Span]) -> Mapping[str, float]:
    """Return the total seconds of each phase that occurred, in the order of PHASES."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.phase] = seconds.get(span.phase, 0.0) + (span.end - span.begin)
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}


def phase_shares(spans: Sequence[Span]) -> Mapping[str, tuple[float, float | None]]:
    """Return the seconds of each phase and its share of the time outside the queue. The share of the queue is None."""
    seconds = phase_totals(spans)
    whole = sum(seconds.values()) - seconds.get("queue", 0.0)
    return {phase: (sum_s, None if phase == "queue" else sum_s / whole) for phase, sum_s in seconds.items()}


def _is_loss(event: Event, phase: str) -> bool:
    """Return whether an event begins the phase ``lost``. A requested stop is not a failure."""
    if event.event == "failed":
        return event.facts.get("cause") != "stopped" and phase not in ("lost", "end")
    return event.event == "restart" and phase == "end"


def _is_end(event: Event, phase: str) -> bool:
    if event.event == "failed":
        return event.facts.get("cause") == "stopped" and phase != "end"
    return event.event in ("training_ended", "stopping") and phase == "training"


def _last_step(history: History, before: float) -> float:
    """Return the time of the last step in the history up to the time ``before``, or ``before`` if there is none."""
    known = [(time, step) for time, step in history.points(of_ranks.LAST_STEP.name) if time <= before]
    return max(known, key=lambda row: row[1], default=(before, 0.0))[0]  # the first row with the highest step


def _caught_up(history: History, event: Event) -> float:
    """Return the time at which restarted ranks again reached the last step before the restart.

    ``event`` is the first step of the ranks after the restart.
    """
    steps = history.points(of_ranks.LAST_STEP.name)
    before = max((step for time, step in steps if time < event.time), default=-1.0)
    if event.step is not None and event.step >= before:
        return event.time
    return next((time for time, step in steps if time >= event.time and step >= before), event.time)


def _within(events: Sequence[Event]) -> list[Span]:
    """Return the spans in which rank 0 saved a checkpoint, loaded a checkpoint, or evaluated the model."""
    spans = []
    for event in events:
        if event.rank not in (0, None):
            continue
        if event.event == "checkpoint_saved" and (waited := _seconds(event.facts.get("waited_s"))):
            begun = event.time - (event.seconds or waited)
            spans.append(Span(phase="checkpoints", begin=begun, end=begun + waited))
        elif event.event == "epoch_ended" and (took := _seconds(event.facts.get("evaluation_s"))):
            spans.append(Span(phase="evaluation", begin=event.time - took, end=event.time))
        elif event.event == "checkpoint_loaded" and event.seconds:
            spans.append(Span(phase="restore", begin=event.time - event.seconds, end=event.time))
    return spans


def _seconds(value: object) -> float:
    return float(value) if is_time(value) else 0.0  # type: ignore[arg-type]


def _cut(whole: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """Insert the spans in ``parts`` into the spans in ``whole``.

    Restores are inserted into the phase ``import``, and all other parts into the phase ``training``.
    """
    spans: list[Span] = []
    for span in whole:
        at = span.begin
        for part in sorted(parts, key=lambda part: part.begin) if span.phase in ("training", "import") else ():
            begin, end = max(part.begin, at), min(part.end, span.end)
            if end > begin and (part.phase == "restore") == (span.phase == "import"):
                spans += [Span(phase=span.phase, begin=at, end=begin)] if begin > at else []
                spans.append(Span(phase=part.phase, begin=begin, end=end))
                at = end
        spans += [Span(phase=span.phase, begin=at, end=span.end)] if span.end > at else []
    return spans


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The phases and events of a run from its launch until now or its end."""

    run: Run
    status: RunStatus
    now: float  # when the nodes were asked, in seconds since the epoch
    events: tuple[Event, ...]
    history: History
    spans: tuple[Span, ...]
    environments: Mapping[int, Mapping[str, str]]  # the machine and the software of each node
    last_lines: str = ""  # the last log lines of the rank that failed first, or of its node
    last_lines_of: str = ""
    silent: tuple[str, ...] = ()  # a message for each node that did not answer
    torn: tuple[str, ...] = ()  # messages about lines that could not be read
    restarts: int = 0

    @property
    def begin(self) -> float:
        """The time at which the timeline begins: the end of the first wait in a queue, or the launch."""
        first, *others = self.spans or (Span(phase="start", begin=self.run.created, end=self.run.created),)
        return first.end if first.phase == "queue" and others else first.begin

    @property
    def end(self) -> float:
        """The end of the last span. If there are no spans, it is the end of the history."""
        return self.spans[-1].end if self.spans else max(self.history.end, self.run.created)


def load_timeline(context: AppContext, run: Run) -> Timeline:
    """Load the timeline of a run from its nodes. Raises DdpctlError if the target does not answer."""
    (status,) = launcher.status(context, (run,))
    probe = Probe(metrics=False, files=(HISTORY, EVENTS_BEFORE, EVENTS, ENVIRONMENT), placed=True)
    answers = launcher.probe(context, run, probe)
    history = History(nodes={answer.node: read_history(answer.files.get(HISTORY, "")) for answer in answers})
    events = read_events(*(answer.files.get(name, "") for answer in answers for name in (EVENTS_BEFORE, EVENTS)))
    placed = {answer.node: answer.placed for answer in answers}
    now = time.time()
    last_lines_of, last_lines = _last_output(context, run, status)
    spans: tuple[Span, ...] = ()
    if events or not (status.ended or status.state == "unknown"):  # else they are lost, or have another format
        spans = phase_spans(events, run, status.state, placed=placed, now=now, history=history)
    return Timeline(
        run=run,
        status=status,
        now=now,
        events=events,
        history=history,
        spans=spans,
        environments=read_environments(answers),
        last_lines=last_lines,
        last_lines_of=last_lines_of,
        silent=tuple(f"node {answer.node}: {answer.failure}" for answer in answers if answer.failure),
        torn=tuple(
            f"node {answer.node}: skipped {count} unreadable line{'s' * (count > 1)} of {name}"
            for answer in answers
            for name in (EVENTS_BEFORE, EVENTS, HISTORY)
            if (count := (strange_rows if name == HISTORY else strange_lines)(answer.files.get(name, "")))
        ),
        restarts=count_restarts(events, placed),
    )


def _last_output(context: AppContext, run: Run, status: RunStatus) -> tuple[str, str]:
    """Return the rank or node whose log shows why a run failed, and the end of this log.

    Return two empty strings if the run has not failed, or if there is no such log.
    """
    outcome = status.outcome
    if status.state not in ("failed", "lost"):
        return "", ""
    node = (outcome.node if outcome else None) or 0
    names = (NODE_LOG,) if outcome is None or outcome.rank is None else (rank_log(outcome.rank), NODE_LOG)
    answers = launcher.probe(context, run, Probe(metrics=False, files=names, max_bytes=LOG_BYTES))
    answer = next((answer for answer in answers if answer.node == node), None)
    name = next((name for name in names if answer and answer.files.get(name, "").strip()), None)
    if answer is None or name is None:
        return "", ""
    who = f"rank {outcome.rank} on node {node}" if outcome and name != NODE_LOG else f"node {node}"
    return who, answer.files[name]


def read_environments(answers: Sequence[ProbeResult]) -> dict[int, dict[str, str]]:
    """Return the machine and the software of each node that has recorded them. They are empty if unreadable."""
    environments: dict[int, dict[str, str]] = {}
    for answer in answers:
        if ENVIRONMENT in answer.files:
            environments[answer.node] = {}
            with suppress(ValueError, AttributeError, RecursionError):
                facts = json.loads(answer.files[ENVIRONMENT])
                environments[answer.node] = {str(key): str(value) for key, value in facts.items()}
    return environments


def timeline_events(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events that matter to a user, ordered by time. An event that all nodes report is listed once."""
    listed: list[Event] = []
    for event in events:
        if event.event not in EVENT_KINDS or (event.event == "node_started" and "requeued_s" not in event.facts):
            continue
        key = (event.event, event.attempt, event.facts.get("signal"), event.facts.get("reason"))
        if event.event in OF_ALL and any(
            key == (other.event, other.attempt, other.facts.get("signal"), other.facts.get("reason"))
            and event.time - other.time < SAME_S
            and (event.event != "node_started" or event.node != other.node)
            for other in listed
        ):
            continue
        listed.append(event)
    return tuple(listed)


def describe_event(event: Event) -> str:
    """Describe an event in one line."""
    facts = event.facts
    who = f"node {event.node}" if event.rank is None else f"rank {event.rank} on node {event.node}"
    match event.event:
        case "node_started":
            return f"started again, {_seconds(facts.get('requeued_s')):.0f} s after the last event"
        case "failed":
            happened = "" if facts.get("cause") == "stopped" else " failed"
            return f"attempt {event.attempt}{happened}: {facts.get('message', who)}"
        case "recovered":
            return (
                f"training again, {event.seconds or 0:.1f} s after the failure; {facts.get('steps_lost', 0)} steps lost"
            )
        case "took_place":
            return f"spare {facts.get('machine', '?')} takes the place of node {event.node}"
        case "straggler":
            ratio = facts.get("ratio")
            return f"{who} is slow" + (f": {ratio:.1f} x the others" if isinstance(ratio, float) else "")
        case "straggler_gone":
            return f"{who} is as fast as the others again"
        case "signal":
            received, sent = facts.get("signal", "a signal"), facts.get("sent")
            happened = facts.get("reason", f"{received} was received")
            return f"{happened}; the ranks get {sent}" if sent not in (None, received) else str(happened)
        case "checkpoint_failed" | "resumed_apart":
            failed = "a checkpoint could not be written: " * (event.event == "checkpoint_failed")
            return f"{failed}{facts.get('message', '')}"
        case "stopping":
            return f"the ranks stop after step {event.step}"
        case other:
            return f"{other.replace('_', ' ')}, {who}"
