"""Where a launch's time went: the phases of a run, one after another, from what its nodes told. Pure.

A run is in a phase until its last node is through with it. What a failure cost is one phase, ``lost``: from the last
step before it until the ranks are where they had been.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ddpctl.watch.course import Course
from ddpwire import rank_catalogue as of_ranks
from ddpwire.events import Event, is_time
from ddpwire.history import TIME

PHASES = (
    "queue",  # until the target gave it a place; where that is not known, until its nodes began
    "start",  # of the nodes: an image is pulled, a container made
    "preflight",
    "rendezvous",
    "import",  # and what else the ranks do before their first step
    "restore",
    "first step",
    "training",
    "evaluation",
    "checkpoints",  # in which the loop waited for one
    "running",  # of a script that gives no sign of its steps
    "lost",
    "end",
)
# The event that all nodes must have told of, and the phase that follows.
_NEXT = {
    "node_started": "preflight",
    "preflight_done": "rendezvous",
    "rendezvous_done": "import",
    "training_began": "first step",
    "first_step": "training",
}
_NOTHING_YET = ("queue", "start")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of the run's time, in seconds since the epoch."""

    phase: str
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end - self.begin


@dataclass(kw_only=True)
class _Clock:
    """The phase that the run is in, and since when."""

    phase: str
    since: float
    spans: list[Span] = field(default_factory=list)

    def turn(self, phase: str, at: float) -> None:
        """The present phase ends; a node's clock may be behind, and time does not run back."""
        at = max(at, self.since)
        if at > self.since:
            self.spans.append(Span(phase=self.phase, begin=self.since, end=at))
        self.phase, self.since = phase, at


def spans(
    events: Sequence[Event],
    *,
    created: float,
    placed: float | None,
    queued: bool,
    now: float,
    nodes: int,
    course: Course,
) -> tuple[Span, ...]:
    """The run's time in the order in which it went by. ``placed``: when its target gave it a place, where it knows.

    ``queued``: whether it has a queue at all.
    """
    clock = _Clock(phase="queue" if queued else "start", since=created)
    if placed is not None:
        clock.turn("start", placed)
    following = _NEXT if _tells_of_steps(events) else {**_NEXT, "ranks_started": "running"}
    told: dict[str, set[int]] = {}
    present = len({event.node for event in events}) or nodes
    last = created
    for event in events:
        if event.event == "node_started" and clock.phase not in (*_NOTHING_YET, "preflight", "lost"):
            clock.turn("lost", last)  # the run was begun anew
            told.clear()
        last = max(last, event.time)
        if _is_loss(event, clock.phase):
            clock.turn("lost", max(_last_step(course, event.time), clock.since))
            told.clear()
        elif _is_end(event, clock.phase):
            clock.turn("end", event.time)
        elif event.event in following:
            told.setdefault(event.event, set()).add(event.node)
            if len(told[event.event]) >= present and _is_later(clock.phase, following[event.event]):
                caught_up = clock.phase == "lost" and event.event == "first_step"
                clock.turn(following[event.event], _caught_up(course, event) if caught_up else event.time)
    ended = max((event.time for event in events if event.event == "node_ended"), default=None)
    clock.turn("end", now if ended is None else ended)
    return tuple(_cut(clock.spans, _within(events)))


def totals(found: Iterable[Span]) -> Mapping[str, float]:
    """Seconds by phase, in the phases' order; those that there were."""
    seconds: dict[str, float] = {}
    for span in found:
        seconds[span.phase] = seconds.get(span.phase, 0.0) + span.seconds
    return {phase: seconds[phase] for phase in PHASES if phase in seconds}


def _is_loss(event: Event, phase: str) -> bool:
    """A failure; not the ranks' end after a stop, and after the training's end only if they are started anew."""
    if event.event == "failed":
        return event.facts.get("cause") != "stopped" and phase not in ("lost", "end")
    return event.event == "restart" and phase == "end"


def _is_end(event: Event, phase: str) -> bool:
    if event.event == "failed":
        return event.facts.get("cause") == "stopped" and phase != "end"
    return event.event in ("training_ended", "stopping") and phase == "training"


def _is_later(phase: str, following: str) -> bool:
    """Whether the run gets on by this; once something was lost, only by training again."""
    if phase == "lost":
        return following in ("training", "running")
    return PHASES.index(following) > PHASES.index(phase)


def _last_step(course: Course, before: float) -> float:
    """When the last step was taken before a failure was seen, as far as the history tells; else that moment."""
    at, best = before, -1.0
    for time, step in _steps(course):
        if time > before:
            break
        if step > best:
            at, best = time, step
    return at


def _caught_up(course: Course, event: Event) -> float:
    """When the ranks are where they had been before the failure."""
    before = max((step for time, step in _steps(course) if time < event.time), default=-1.0)
    return next((time for time, step in _steps(course) if time >= event.time and step >= before), event.time)


def _steps(course: Course) -> list[tuple[float, float]]:
    name = of_ranks.LAST_STEP.name
    return sorted((row[TIME], row[name]) for rows in course.nodes.values() for row in rows if name in row)


def _tells_of_steps(events: Sequence[Event]) -> bool:
    return any(event.event in ("first_step", "training_began") for event in events)


def _within(events: Sequence[Event]) -> list[Span]:
    """What the ranks did instead of training, as rank 0 tells; and what they did before it."""
    found = []
    for event in events:
        if event.rank not in (0, None):
            continue
        if event.event == "checkpoint_saved" and (waited := _seconds(event.facts.get("waited_s"))):
            begun = event.time - (event.seconds or waited)
            found.append(Span(phase="checkpoints", begin=begun, end=begun + waited))
        elif event.event == "epoch_ended" and (took := _seconds(event.facts.get("evaluation_s"))):
            found.append(Span(phase="evaluation", begin=event.time - took, end=event.time))
        elif event.event == "checkpoint_loaded" and event.seconds:
            found.append(Span(phase="restore", begin=event.time - event.seconds, end=event.time))
    return found


def _seconds(value: object) -> float:
    return float(value) if is_time(value) else 0.0  # type: ignore[arg-type]


def _cut(whole: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """The spans with those parts of them told apart; a part counts only in training, or a restore before it."""
    found: list[Span] = []
    for span in whole:
        at = span.begin
        for part in sorted(parts, key=lambda one: one.begin) if span.phase in ("training", "import") else ():
            begin, end = max(part.begin, at), min(part.end, span.end)
            if end > begin and (part.phase == "restore") == (span.phase == "import"):
                found += [Span(phase=span.phase, begin=at, end=begin)] if begin > at else []
                found.append(Span(phase=part.phase, begin=begin, end=end))
                at = end
        found += [Span(phase=span.phase, begin=at, end=span.end)] if span.end > at else []
    return found
