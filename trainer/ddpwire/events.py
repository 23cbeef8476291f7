"""``events.jsonl``: what happened on a node. Each line is a JSON object.

The lines are in the order in which they were written. The node's ddprun and its ranks write the file, each event with a
single append. ddpctl reads the file. A run's events are those of all its nodes, sorted by time. The size is bounded: a
full file is renamed to ``events.1.jsonl`` and replaces the older file of that name.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ddpwire import names
from ddpwire.run_files import append_bounded, read_end

EVENTS: Final = "events.jsonl"
EVENTS_BEFORE: Final = "events.1.jsonl"
EVENTS_FILE: Final = "DDP_EVENTS_FILE"  # set by ddprun for each rank
LAST_TIME: Final = 1e11
MOST_BYTES = 4_000_000  # per file, so twice that per node

KINDS: Mapping[str, str] = {
    # of a node, by ddprun
    "node_started": (
        "ddprun started. Keys: host, pid. After a requeue also requeued_s: the seconds since the last event before it."
    ),
    "preflight_done": "The machine was checked and node 0 was found. Keys: seconds (since node_started).",
    "rendezvous_done": (
        "The nodes of an attempt have joined. Keys: seconds (time spent waiting for them), nodes (their number)."
    ),
    "ranks_started": (
        "The ranks were started. Keys: seconds (duration, with imports), ranks (a list of their numbers), world_size."
    ),
    "first_step": "A rank of this node sent the first heartbeat of this attempt. Keys: seconds (since ranks_started).",
    "rank_exited": (
        "A rank ended. Keys: cause (as in ddp_rank_exits_total), status (its exit code; negative for a signal)."
    ),
    "failed": "An attempt failed. Keys: cause and message (as in outcome.json), rank and node (where it failed).",
    "took_place": (
        "This spare takes the place of a lost node. Keys: machine (its number as a spare), epoch (of node 0)."
    ),
    "restart": "All ranks are about to be restarted. Keys: reason (as in ddp_restarts_total).",
    "recovered": "Training continues after a restart. Keys: seconds (since the failure), steps_lost.",
    "signal": (
        "ddprun received a signal that requests a stop, or a signal for the ranks, or requests a stop itself. Keys: "
        "signal (the received one) or reason (of ddprun itself), sent (the signal that the ranks get; not of a second "
        "stop)."
    ),
    "checkpoint_copied": (
        "This node has copied node 0's checkpoints. Keys: step, seconds (duration), bytes (received)."
    ),
    "node_ended": "ddprun ended. Keys: code, cause and message (as in outcome.json), seconds (since node_started).",
    # of a rank, by ddptrain, some also by ddpwire.script
    "training_began": (
        "The first step begins. Keys: seconds (since the rank's start). startup_s and restore_s are parts of this time."
    ),
    "checkpoint_loaded": "Training continues from a checkpoint. Keys: seconds (duration), path.",
    "started_over": (
        "Restarted ranks found no checkpoint and begin at step 1 again. Keys: steps (taken before the restart)."
    ),
    "resumed_apart": (
        "Ranks have resumed from different checkpoints. Keys: message, groups (for each: its ranks, and their file and "
        "step), unknown (the ranks that were not observed)."
    ),
    "checkpoint_saved": (
        "A checkpoint is on the disk. Keys: seconds (duration), waited_s (time that the loop waited), bytes, path."
    ),
    "checkpoint_failed": "A checkpoint could not be written, or ddprun could not copy it. Keys: message.",
    "checkpoint_uploaded": (
        "A checkpoint is in the object store and was verified there. Keys: seconds (duration), bytes, url."
    ),
    "upload_failed": "The upload of a checkpoint failed. It will be tried again. Keys: message.",
    "epoch_ended": (
        "An epoch ended. Keys: epoch (from 1), loss, accuracy, images_per_s, evaluation_s, seconds (spent in steps)."
    ),
    "not_finite": "For the first time, a rank's loss or gradient is NaN or infinite. Keys: what (loss or gradient).",
    "communication_chosen": (
        "--communication auto has measured the first steps. Keys: way, expected_s (seconds per step of each way), "
        "compute_s (per step), latency_s and bytes_per_s (of an all-reduce)."
    ),
    "straggler": "A rank is slow. Keys: rank, node, ratio (its own step time divided by that of the others).",
    "straggler_gone": "The slow rank is as fast as the others again. Keys: as for straggler.",
    "stopping": "The ranks agreed to stop after a step. Keys: code (the exit code for the signal).",
    "training_ended": "The last step ended. Keys: productive_s, lost_s (the unproductive seconds by cause).",
}


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of the file. Values without a field of their own are in ``facts``."""

    time: float  # when it happened or ended, in seconds since the epoch
    event: str  # one of KINDS; another version may have more
    node: int
    attempt: int = 1
    rank: int | None = None
    step: int | None = None
    seconds: float | None = None  # how long it took, if it is the end of something
    facts: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the line that is written to the file."""
        own = {key: value for key, value in vars(self).items() if value is not None and key != "facts"}
        own["time"] = round(self.time, 3)
        if self.seconds is not None:
            own["seconds"] = round(self.seconds, 4)
        return json.dumps({**own, **self.facts}) + "\n"


class EventLog:
    """Writes the events of one process. Events are dropped if there is no path or if writing fails."""

    def __init__(self, path: str | Path | None, *, node: int, rank: int | None = None, attempt: int = 1) -> None:
        self.attempt = attempt
        self.append: Callable[[Path, bytes, int], object] = append_bounded  # raises OSError
        self._path = Path(path) if path else None
        self.node, self._rank = node, rank

    def emit(
        self,
        event: str,
        *,
        step: int | None = None,
        seconds: float | None = None,
        rank: int | None = None,
        node: int | None = None,
        ago_s: float = 0.0,
        **facts: Any,
    ) -> None:
        """Record an event that happened ``ago_s`` seconds ago. ``rank`` and ``node`` override those of the writer."""
        if self._path is None:
            return
        record = Event(
            event=event,
            time=time.time() - ago_s,
            node=self.node if node is None else node,
            attempt=self.attempt,
            rank=self._rank if rank is None else rank,
            step=step,
            seconds=seconds,
            facts=facts,
        )
        with contextlib.suppress(OSError):  # a full disk must not stop a training
            self.append(self._path, record.line().encode(), MOST_BYTES)


def events_of(environ: Mapping[str, str]) -> EventLog:
    """Return the event log of the rank whose environment this is."""
    return EventLog(
        environ.get(EVENTS_FILE),
        node=int(environ.get(names.RANKS_NODE) or 0),
        rank=int(environ.get(names.RANK) or 0),
        attempt=int(environ.get(names.ATTEMPT) or 1),
    )


def read_events(*texts: str) -> tuple[Event, ...]:
    """Return the events in the given contents of files, sorted by time. Invalid lines are skipped."""
    events = (_event(line) for text in texts for line in text.split("\n"))
    return tuple(sorted(filter(None, events), key=lambda event: event.time))


def read_last_events(node_dir: Path, max_bytes: int) -> tuple[Event, ...]:
    """Return the events in the last ``max_bytes`` of each of a node's two files. Unreadable files are skipped."""
    texts = []
    for name in (EVENTS_BEFORE, EVENTS):
        with contextlib.suppress(OSError):
            texts.append(read_end(node_dir / name, max_bytes))
    return read_events(*texts)


def strange_lines(text: str) -> int:
    """Return how many lines of a file are not events.

    The last line, which may be incomplete, is not counted. A first line whose beginning was cut off is not counted
    either.
    """
    lines = text.split("\n")[0 if text.startswith("{") else 1 : -1]
    return sum(1 for line in lines if line.strip() and _event(line) is None)


def is_time(value: object) -> bool:
    """Return whether ``value`` is a number of seconds since the epoch, at most ``LAST_TIME`` (the year 5138)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LAST_TIME


def _event(line: str) -> Event | None:
    try:
        facts = json.loads(line)
        own = {key: facts.pop(key) for key in Event.__dataclass_fields__ if key in facts and key != "facts"}
        event = Event(**own, facts=facts)
        counts = [event.node, event.attempt, *(count for count in (event.rank, event.step) if count is not None)]
        is_valid = (
            isinstance(event.event, str)
            and is_time(event.time)
            and all(type(count) is int and abs(count) <= LAST_TIME for count in counts)
            and (event.seconds is None or is_time(abs(event.seconds)))
        )
        return event if is_valid else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
