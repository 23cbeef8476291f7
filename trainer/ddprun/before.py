"""What an earlier start of the same run left in this node's folder: how far it came, and when it was last heard of.

A queue starts a run again after a preemption, Kubernetes a pod after its node's death. What the ranks counted goes on
then, so that goodput is the run's and not the last start's. Another run's leavings are cleared away.
"""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from ddpwire.events import EVENTS, EVENTS_BEFORE, read_events
from ddpwire.folder import HEARTBEAT, METRICS, NODE, NODE_LOG, OUTCOME, SNAPSHOT
from ddpwire.heartbeat import read_beat
from ddpwire.history import HISTORY

LAST_BYTES = 65536  # of the events that are asked for steps
UNNAMED = "none"  # the id of runs to which nobody gave one: each is another
RUN = f"{METRICS}/run"  # whose counts they are; node.json may have been removed by a batch script


@dataclass(frozen=True, kw_only=True)
class Before:
    """An earlier start."""

    heard_at: float  # in seconds since the epoch
    step: int | None  # the highest of all attempts, as far as is known


def look_back(node_dir: Path, run_id: str) -> Before | None:
    """What there was, and clear away what must not be taken for this start's; None: nothing of this run.

    Raises OSError.
    """
    before = _before(node_dir, run_id)
    if before is None:
        shutil.rmtree(node_dir / METRICS, ignore_errors=True)
        for name in (EVENTS, EVENTS_BEFORE, HISTORY):
            (node_dir / name).unlink(missing_ok=True)
    for gauges in node_dir.glob(f"{METRICS}/*/gauge_*"):
        gauges.unlink(missing_ok=True)
    for name in (OUTCOME, SNAPSHOT):
        (node_dir / name).unlink(missing_ok=True)
    (node_dir / METRICS).mkdir(exist_ok=True)
    (node_dir / RUN).write_text(run_id)
    return before


def _before(node_dir: Path, run_id: str) -> Before | None:
    try:
        if (node_dir / RUN).read_text() != run_id or run_id == UNNAMED:
            return None
    except (OSError, ValueError):
        return None
    heard = []
    for name in (RUN, NODE, EVENTS, NODE_LOG, OUTCOME):
        with contextlib.suppress(OSError):
            heard.append((node_dir / name).stat().st_mtime)
    beats = [read_beat(path) for path in node_dir.glob(f"{HEARTBEAT}/rank-*")]
    steps = [beat.step for beat in beats if beat]
    steps += [event.step for event in read_events(_tail(node_dir / EVENTS)) if isinstance(event.step, int)]
    return Before(heard_at=max(heard), step=max(steps, default=None))


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LAST_BYTES))
        return file.read().decode(errors="replace")
    return ""
