"""Which events of a run a person should know of, each once though every node tells of it, and in which words. Pure."""

from collections.abc import Sequence

from ddpwire.events import Event

KINDS = ("failed", "recovered", "straggler", "straggler_gone", "signal", "stopping", "checkpoint_failed")
BAD = ("failed", "checkpoint_failed")
OF_ALL = ("failed", "recovered", "signal", "stopping")  # every node, or every rank, tells of it
SAME_S = 60.0  # nodes tell of the same within so long


def notable(events: Sequence[Event]) -> tuple[Event, ...]:
    """Those events, by their time."""
    found: list[Event] = []
    for event in events:
        if event.event not in KINDS:
            continue
        key = (event.event, event.attempt, event.facts.get("signal"))
        if event.event in OF_ALL and any(
            key == (one.event, one.attempt, one.facts.get("signal")) and event.time - one.time < SAME_S for one in found
        ):
            continue
        found.append(event)
    return tuple(found)


def words(event: Event) -> str:
    """An event in a line."""
    facts = event.facts
    who = f"node {event.node}" if event.rank is None else f"rank {event.rank} on node {event.node}"
    match event.event:
        case "failed":
            happened = "was stopped" if facts.get("cause") == "stopped" else "failed"
            return f"attempt {event.attempt} {happened}: {facts.get('message', who)}"
        case "recovered":
            return (
                f"training again, {event.seconds or 0:.1f} s after the failure; {facts.get('steps_lost', 0)} steps lost"
            )
        case "straggler":
            ratio = facts.get("ratio")
            return f"{who} is slow" + (f": {ratio:.1f} x the others" if isinstance(ratio, float) else "")
        case "straggler_gone":
            return f"{who} is as fast as the others again"
        case "signal":
            return f"{facts.get('signal', 'a signal')} came"
        case "checkpoint_failed":
            return f"a checkpoint could not be written: {facts.get('message', '')}"
        case "stopping":
            return f"the ranks stop after step {event.step}"
        case other:
            return f"{other.replace('_', ' ')}, {who}"
