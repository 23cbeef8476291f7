"""What this node's ranks show of their life: heartbeats and what /proc says; and who of all ranks holds the others up.

Its own look is an effect, the judgement pure. A rank is silent since its last beat, or, whether it beats or not, since
it was seen stopped (SIGSTOP). Before its first beat a rank that runs is given all the time it needs: to import,
to compile, to load.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpwire.folder import rank_heartbeat
from ddpwire.heartbeat import Beat, read_beat, read_stopped_for
from ddpwire.node import RankProcess

TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.1  # cores; a rank that computes, or waits for a GPU, takes a whole one


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A rank as its node sees it at this moment."""

    rank: int
    node: int
    step: int | None  # None: it has not beaten
    silent_s: float
    stopped: bool  # frozen by SIGSTOP
    busy: bool  # took CPU time since its last beat


@dataclass(frozen=True, kw_only=True)
class Mark:
    """When something about a rank last changed."""

    key: tuple[int | None, bool]  # step, stopped
    at_s: float
    cpu_s: float


class Pulse:
    """The signs of the ranks of the present attempt."""

    def __init__(self, node_dir: Path, node: int) -> None:
        self._node_dir = node_dir
        self._node = node
        self._marks: dict[int, Mark] = {}
        self._ranks: tuple[RankProcess, ...] = ()

    def follow(self, ranks: tuple[RankProcess, ...]) -> None:
        """A new attempt: these are its ranks."""
        self._marks = {}
        self._ranks = ranks

    def step(self, rank: int) -> int | None:
        """The last step of a rank, also after its death."""
        beat = self.beat(rank)
        return beat.step if beat else None

    def stopped_for(self, rank: int) -> int | None:
        """The rank that was told to stop, as a rank that stopped with it has said; None: it has not."""
        return read_stopped_for(self._node_dir / rank_heartbeat(rank))

    def beat(self, rank: int) -> Beat | None:
        """The last sign of life of a rank, also after its death."""
        return read_beat(self._node_dir / rank_heartbeat(rank))

    def beats(self) -> dict[int, Beat]:
        """Those of the ranks of the present attempt, of those that have given any."""
        return {process.rank: beat for process in self._ranks if (beat := self.beat(process.rank))}

    def look(self) -> tuple[Sign, ...]:
        """The ranks that are alive."""
        return tuple(sign for rank in self._ranks if (sign := self._sign(rank, time.monotonic())))

    def _sign(self, process: RankProcess, now_s: float) -> Sign | None:
        seen = _stat(process.pid)
        if seen is None:
            return None
        stopped, cpu_s = seen
        beat = self.beat(process.rank)
        key = (beat.step if beat else None, stopped)
        mark = self._marks.get(process.rank)
        if mark is None or mark.key != key:
            mark = self._marks[process.rank] = Mark(key=key, at_s=now_s, cpu_s=cpu_s)
        since_s = now_s - mark.at_s
        silent_s = now_s - beat.at_s if beat else since_s if stopped else 0.0
        busy = cpu_s - mark.cpu_s > BUSY * since_s
        return Sign(rank=process.rank, node=self._node, step=key[0], silent_s=silent_s, stopped=stopped, busy=busy)


def _stat(pid: int) -> tuple[bool, float] | None:
    """Whether a process is stopped, and its CPU seconds (proc(5)); None: it has ended, or there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else (fields[0] == "T", (int(fields[11]) + int(fields[12])) / TICKS)
    except (OSError, ValueError, IndexError):
        return None


def hung(signs: Sequence[Sign], timeout_s: float) -> Sign | None:
    """The rank that holds the others up; None: nobody hangs, or nobody can say.

    Ranks wait for each other, so that when one hangs all fall silent: as long as one of them beats, none hangs. A rank
    that was stopped needs no other's silence.
    """
    if not timeout_s:
        return None
    stopped = [sign for sign in signs if sign.stopped and sign.silent_s > timeout_s]
    beating = [sign for sign in signs if sign.step is not None]
    if not stopped and not (beating and all(sign.silent_s > timeout_s for sign in beating)):
        return None
    last = min((sign.step for sign in stopped or beating if sign.step is not None), default=None)
    behind = [sign for sign in stopped or beating if sign.step == last]
    num_busy = sum(sign.busy for sign in behind)
    odd = 2 * num_busy < len(behind) and num_busy > 0  # one computes while the others wait, or the other way round
    return min(behind, key=lambda sign: (not sign.stopped, sign.busy != odd, sign.rank))


def describe(sign: Sign, timeout_s: float) -> str:
    """How one sees that it hangs."""
    where = "before its first step" if sign.step is None else f"after step {sign.step}"
    what = "is stopped (SIGSTOP)" if sign.stopped else "takes CPU time" if sign.busy else "takes no CPU time"
    return f"no sign of life for {sign.silent_s:.0f} s (--hang-timeout {timeout_s:g}) {where}, and it {what}"
