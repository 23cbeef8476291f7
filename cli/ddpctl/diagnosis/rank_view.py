"""The data that a node reports about each rank: collectives, Python stacks and processes.

The collectives are from torch's flight recorder, the stacks from faulthandler, and the processes from /proc.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ddpctl.text import one_line

MIN_WAIT_S, PACES = 2.0, 5  # a wait is unusual if it exceeds both MIN_WAIT_S and PACES times the usual time
DEFAULT_GROUP = "0"
LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python\d[.\d]*/|^<")
SAVING = re.compile(r"torch/(serialization|distributed/checkpoint/\w+)\.py$|/checkpoint(_manager)?\.py$")
LOADER = "torch/utils/data/dataloader.py"
READING = "torch/utils/data/_utils/fetch.py"
COLLECTIVES = "torch/distributed/distributed_c10d.py"
WAITING = re.compile(rf"/lib/python\d[.\d]*/(?!(site|dist)-packages/)|{LOADER}$|^<")
BUSY_CORES, WAKES_PER_S = 0.5, 10  # a blocked rank wakes up for each sample
TICKS_PER_S = 100
ITEM_SIZES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}  # torch's names
# The kernel functions in which a process waits, and what they mean.
WAITS = (
    (re.compile(r"nanosleep"), "is sleeping"),
    (re.compile(r"futex"), "is waiting for a lock or for another thread"),
    (re.compile(r"flock|lock_file|locks_"), "is waiting for a file lock"),
    (re.compile(r"pipe_read|pipe_wait"), "is reading from a pipe"),
    (re.compile(r"wait_for_partner"), "is waiting for the other end of a pipe"),
    (re.compile(r"wait_woken|n_tty"), "is waiting for the network or a terminal"),
    (re.compile(r"do_wait|kernel_wait"), "is waiting for a process that it started"),
    (re.compile(r"sk_wait|tcp|inet|skb|unix_|accept"), "is waiting for the network"),
    (re.compile(r"poll|select|ep_"), "is waiting for a pipe or the network"),
    (re.compile(r"nfs|rpc|io_schedule|folio|balance_dirty|jbd2|xfs|fuse|request_wait"), "is waiting for a file system"),
)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective that a rank has entered."""

    group: str
    desc: str
    seq: int
    op: str
    sizes: str
    dtypes: str
    done: bool
    at: float  # on node 0's clock, in seconds since the epoch

    @property
    def name(self) -> str:
        """The name of the collective in sentences, such as ``all_reduce #8 of the default group``."""
        group = "the default group" if self.group == DEFAULT_GROUP else f"group {self.group}"
        named = f" ({self.desc})" if self.group != DEFAULT_GROUP and self.desc not in ("", "undefined") else ""
        return one_line(f"{self.op} #{self.seq} of {group}{named}")

    @property
    def num_bytes(self) -> int:
        """The size of the inputs in bytes. An unknown type counts as 4 bytes per element."""
        shapes = zip(self.sizes.split("] ["), self.dtypes.split(), strict=False)
        return sum(math.prod(map(int, re.findall(r"\d+", sizes))) * ITEM_SIZES.get(dtype, 4) for sizes, dtype in shapes)

    @property
    def shape(self) -> str:
        """The types and shapes of the inputs, such as ``Float [13]``."""
        return one_line(f"{self.dtypes} {self.sizes}") if self.sizes else "no tensor"


Frame = tuple[str, int, str]  # file, line, function; a stack of frames begins with the innermost one


@dataclass(frozen=True, kw_only=True)
class RankView:
    """The data of one rank. ``states`` and ``stacks`` have one entry per sample."""

    rank: int
    node: int
    group_at: float | None  # when the rank created its first process group; None: none, or unknown
    read_at: float
    states: tuple[Mapping[str, Any], ...]
    stacks: tuple[tuple[Frame, ...], ...]  # of the main thread; an empty stack: no answer
    workers: tuple[tuple[tuple[Frame, ...], Mapping[str, Any]], ...]  # data loader workers and other children
    collectives: Mapping[tuple[str, int], Collective]
    unknown: str = ""
    clock_is_known: bool = True  # its times can be compared with those of node 0

    @property
    def who(self) -> str:
        """The rank and its node as text, such as ``rank 3 (node 1)``."""
        return f"rank {self.rank} (node {self.node})"

    @property
    def state(self) -> str:
        """The process state as in proc(5), or an empty string if the process has ended."""
        return str(self.states[-1].get("state", "")) if self.states else ""

    @property
    def waits_in(self) -> Collective | None:
        """The first collective that the rank has entered but not completed, or None."""
        return min(
            (call for call in self.collectives.values() if not call.done), key=lambda call: call.at, default=None
        )

    def is_before(self, collective: Collective) -> bool:
        """Return whether the rank has certainly not entered the collective yet."""
        last = max((seq for group, seq in self.collectives if group == collective.group), default=0)
        return last < collective.seq and (not self.unknown or not self.state)

    @property
    def busy(self) -> bool:
        """Whether the rank used CPU time while it was sampled."""
        ticks = [(state["ticks"], state["time"]) for state in self.states if "ticks" in state]
        spent_s = (ticks[-1][0] - ticks[0][0]) / TICKS_PER_S if ticks else 0.0
        return self.state == "R" or (len(ticks) > 1 and spent_s > BUSY_CORES * (ticks[-1][1] - ticks[0][1]))

    @property
    def pace_s(self) -> float:
        """The longest recent time from one collective to the next, in seconds.

        The time between the last two collectives is not included.
        """
        times = sorted(collective.at for collective in self.collectives.values())
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return max(gaps[-20:-1] or [0.0])

    @property
    def moved_lately(self) -> bool:
        """Whether the rank entered a collective recently: within ``MIN_WAIT_S``, or ``PACES`` times ``pace_s``."""
        last = max((collective.at for collective in self.collectives.values()), default=0.0)
        return self.read_at - last <= max(MIN_WAIT_S, PACES * self.pace_s)

    def share(self, path: str, functions: Sequence[str] = ()) -> float:
        """Return the share of the rank's stacks for which ``has_file`` is true."""
        known = [stack for stack in self.stacks if stack]
        return sum(has_file(stack, path, functions) for stack in known) / len(known) if known else 0.0

    @property
    def runs(self) -> bool:
        """Whether the rank was active: it used CPU time, its samples show different code, or it woke up often."""
        woke = [(state["switches"], state["time"]) for state in self.states if "switches" in state] or [(0, 0.0)]
        places = {tuple(frame for frame in stack if not WAITING.search(frame[0])) for stack in self.stacks if stack}
        computes = not self.unknown and 2 * sum(state.get("state") == "R" for state in self.states) > len(self.states)
        return computes or len(places) > 1 or woke[-1][0] - woke[0][0] > WAKES_PER_S * (woke[-1][1] - woke[0][1])

    @property
    def saves(self) -> bool:
        """Whether the rank was writing a checkpoint in all samples."""
        return bool(self.stacks) and all(
            any(SAVING.search(file) and "save" in function for file, _, function in stack) for stack in self.stacks
        )

    @property
    def has_ended(self) -> bool:
        """Whether the rank's process has ended, even if its parent has not reaped it."""
        return self.state in ("", "Z", "X")

    @property
    def doing(self) -> str:
        """What the rank does, as a sentence without its subject, such as ``is sleeping at dataset.py:88 (read)``."""
        if self.has_ended:
            return "has ended"
        if self.state in ("T", "t"):
            return "is stopped (SIGSTOP)" if self.state == "T" else "is stopped by a debugger"
        stack = self.stacks[-1] if self.stacks else ()
        if [frame[2] for frame in stack] == ["_shutdown"]:  # in threading.py
            return "has reached the end of its script, and is waiting for a thread that it started"
        activity, place = self._activity(stack), place_of(stack)
        text = f"{activity} at {place}" if place else f"{activity}; where in its code is unknown"
        if self.share(LOADER) and (worker := self._worker()):
            text += f", and a worker of its data loader {worker}"
        return text

    def _activity(self, stack: Sequence[Frame]) -> str:
        if self.saves:
            return "is saving"
        library = stack[: next((n for n, frame in enumerate(stack) if not LIBRARY.search(frame[0])), len(stack))]
        for file, _, function in library:
            if file.endswith(COLLECTIVES):
                return f"is in {function}"
            if file.endswith(LOADER):
                return "is waiting for its data loader"
        if self.waits_in and "futex" in str(self.states[-1].get("wchan")):
            return "is waiting"  # the lock is torch's own
        return kernel_wait(self.states[-1], busy=self.busy)

    def _worker(self) -> str:
        for stack, state in self.workers:
            if state.get("state") == "T":
                return "is stopped (SIGSTOP)"
            inner = next((n for n, frame in enumerate(stack) if frame[0].endswith(READING)), None)
            if inner and (place := place_of(stack[:inner])):
                return f"{kernel_wait(state, busy=state.get('state') == 'R')} at {place}"
        return ""


def has_file(stack: Sequence[Frame], path: str, functions: Sequence[str] = ()) -> bool:
    """Return whether the stack has a frame whose path ends with ``path``.

    If ``functions`` is not empty, the frame's function must also be in ``functions``.
    """
    return any(file.endswith(path) and (not functions or name in functions) for file, _, name in stack)


def kernel_wait(state: Mapping[str, Any], *, busy: bool) -> str:
    """Return what a process does according to the kernel, such as ``is sleeping``."""
    if state.get("state") == "D":
        return "is waiting for a disk or a network file system"
    activities = (activity for pattern, activity in WAITS if pattern.search(str(state.get("wchan", ""))))
    return "is computing" if busy else next(activities, "is")


def place_of(stack: Sequence[Frame]) -> str:
    """Return the innermost frame that is not in a library, such as ``dataset.py:88 (read)``, or an empty string."""
    frame = next((frame for frame in stack if not LIBRARY.search(frame[0])), None)
    return one_line(f"{PurePath(frame[0]).name}:{frame[1]} ({frame[2]})") if frame else ""


def read_answer(answer: Mapping[str, Any], *, clock_offset_s: float | None = 0.0) -> tuple[RankView, ...]:
    """Return the ranks in a diagnosis.json. Raises KeyError, TypeError or ValueError if another version wrote it.

    ``clock_offset_s``: how far the node's clock is ahead of node 0's in seconds; None: unknown.
    """
    return tuple(_read_rank(rank, int(answer["node"]), clock_offset_s) for rank in answer["ranks"])


def _read_rank(rank: Mapping[str, Any], node: int, clock_offset_s: float | None) -> RankView:
    offset_s = clock_offset_s or 0.0
    collectives = [
        Collective(
            group=str(call["group"]), desc=str(call["desc"]), seq=int(call["seq"]), op=str(call["op"]),
            sizes=" ".join(map(str, call["sizes"])), dtypes=" ".join(map(str, call["dtypes"])), done=bool(call["done"]),
            at=float(call["at"]) - offset_s,
        )
        for call in rank["collectives"] if not call["p2p"]
    ]  # fmt: skip
    return RankView(
        rank=int(rank["rank"]),
        node=node,
        group_at=None if rank["group_at"] is None else float(rank["group_at"]) - offset_s,
        read_at=float(rank["time"]) - offset_s,
        states=tuple(rank["samples"]),
        stacks=tuple(_main_stack(sample["threads"]) for sample in rank["samples"]),
        workers=tuple((_main_stack(child["threads"]), child) for child in rank["children"]),
        collectives={(collective.group, collective.seq): collective for collective in collectives},
        unknown=str(rank.get("unknown", "")),
        clock_is_known=clock_offset_s is not None,
    )


def _main_stack(threads: Sequence[Sequence[Sequence[Any]]] | None) -> tuple[Frame, ...]:
    return tuple((str(file), int(line), str(function)) for file, line, function in threads[0]) if threads else ()
