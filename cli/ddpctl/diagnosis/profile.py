"""Evaluates a recording of all ranks. The results are a trace for Perfetto, shares of the time, and the slowest rank.

All times refer to node 0's clock. The shares say how much of its time a rank spends in compute, communication or data
loading. They refer to the time span in which all ranks were recorded.
"""

import base64
import gzip
import io
import json
import math
import re
import statistics
import zlib
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ddpctl.diagnosis.rank_view import COLLECTIVES, LOADER, Frame, has_file, place_of
from ddpctl.text import one_line, table
from ddpwire.events import Event
from ddpwire.run_files import parse_json

MAX_TRACE_BYTES = 1 << 28
SLOWER = 0.1  # a rank is called slow if the other ranks wait for it for at least this share of the time
GPU_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
KINDS = ("cpu_op", "user_annotation", *GPU_KINDS)  # kineto's categories that are read
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl|c10d):|nccl(Dev)?Kernel")
SAMPLED = {
    "in_loader": "data",
    "in_collective": "exposed",
}  # for calls without a slice, because they last longer than the recording
SHARES = ("compute", "communication", "exposed", "data", "idle")
PHRASES = {
    "compute": "on compute",
    "data": "on its data loader",
    "idle": "on something other than compute, collectives and its data loader",
}
Window = tuple[float, float]


class Slice(NamedTuple):
    """An event of a thread or a GPU stream. Times are in seconds since the epoch; ``kind`` is kineto's category."""

    thread: str
    begin: float
    end: float
    name: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """The recording of a rank. ``samples`` are the times and the Python stacks of its main thread."""

    rank: int
    node: int
    began: float = 0.0
    ended: float = 0.0
    slices: Sequence[Slice] = ()
    samples: Sequence[tuple[float, tuple[Frame, ...]]] = ()
    flows: Sequence[tuple[str, str, float]] = ()  # name, thread ("" for a collective), start
    unknown: str = ""  # why it was not recorded

    @property
    def who(self) -> str:
        """The rank and its node as text, such as ``rank 3 (node 1)``."""
        return f"rank {self.rank} (node {self.node})"

    def activities(self, window: Window) -> list[tuple[float, str, bool]]:
        """Return each change of activity: the time, the new activity, and whether the rank communicates meanwhile.

        The last entry is the end of the window. Compute is the time in kernels of a GPU. Without a GPU, it is the time
        in operators outside the data loader.
        """
        on_gpu = any(one.kind in GPU_KINDS for one in self.slices)
        order = (*(("compute", "data") if on_gpu else ("data", "compute")), "exposed", *SAMPLED)
        edges = []
        for one in self.slices:
            begin, end = max(one.begin, window[0]), min(one.end, window[1])
            if begin < end and (what := _what(one, on_gpu=on_gpu)):
                edges += [(begin, 1, what), (end, -1, what)]
        active: Counter[str] = Counter()
        found = [(window[0], "idle", False)]
        for at, step, what in sorted(edges):
            active[what] += step
            now = next((SAMPLED.get(one, one) for one in order if active[one]), "idle")
            found.append((at, now, now == "exposed" or active["exposed"] > 0))
        return [*found, (window[1], "idle", False)]


def _what(one: Slice, *, on_gpu: bool) -> str:
    if one.kind in SAMPLED:
        return one.kind
    if COLLECTIVE.match(one.name):
        return "exposed" if on_gpu == (one.kind == "kernel") else ""
    if one.name.startswith("enumerate(DataLoader)"):
        return "data"
    return "compute" if (one.kind in GPU_KINDS if on_gpu else one.kind == "cpu_op") else ""


def read_profile(text: str, *, clock_offset_s: float) -> list[RankProfile]:
    """Return the ranks in a profile.json. Raises ValueError if it is damaged."""
    try:
        answer = parse_json(text)
        return [_read_rank(one, int(answer["node"]), clock_offset_s) for one in answer["ranks"]]
    except (LookupError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged: {error}") from None


def _read_rank(found: Mapping[str, Any], node: int, offset_s: float) -> RankProfile:
    rank = int(found["rank"])
    if "unknown" in found:
        return RankProfile(rank=rank, node=node, unknown=one_line(str(found["unknown"])))
    with gzip.open(io.BytesIO(base64.b64decode(found["trace"]))) as file:
        trace = parse_json(file.read(MAX_TRACE_BYTES))
    base_s = float(trace.get("baseTimeNanoseconds", 0)) / 1e9 - offset_s
    threads: dict[tuple[str, str], str] = {}
    slices, flows = [], []
    for one in sorted(trace["traceEvents"], key=lambda one: str(one["ph"])):  # M (names of threads) before X (slices)
        key = str(one.get("pid")), str(one.get("tid"))
        thread = threads.get(key, f"thread {key[1]}")
        begin = base_s + float(one.get("ts", 0)) / 1e6
        if one["ph"] == "M" and one["name"] == "thread_name":
            threads[key] = one_line(str(one["args"]["name"]))
        elif one["ph"] == "X" and one.get("cat") in KINDS:
            end = base_s + (float(one["ts"]) + float(one["dur"])) / 1e6
            name = one_line(str(one["name"]))
            slices.append(Slice(thread=thread, begin=begin, end=end, name=name, kind=str(one["cat"])))
        elif one["ph"] in ("s", "f"):
            flows.append((one_line(f"{one['cat']} {one['id']} of rank {rank}"), thread, begin))
    for one in found.get("collectives", ()):
        if not one["p2p"]:
            name = one_line(f"{one['op']} #{one['seq']} of group {one['group']}")
            flows.append((name, "", float(one["at"]) - offset_s))
    samples = [
        (float(at) - offset_s, tuple((str(file), int(line), str(function)) for file, line, function in stack))
        for at, stack in found["samples"]
    ]
    for (at, stack), (end, _) in pairwise(samples):
        kind = "in_loader" if has_file(stack, LOADER) else "in_collective" if has_file(stack, COLLECTIVES) else "python"
        name = place_of(stack) or "unknown"
        slices.append(Slice(thread="Python, sampled", begin=at, end=end, name=name, kind=kind))
    began, ended = float(found["began"]) - offset_s, float(found["ended"]) - offset_s
    return RankProfile(rank=rank, node=node, began=began, ended=ended, slices=slices, samples=samples, flows=flows)


def summarise(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Return the length of the common time span, the shares of each rank, and the slowest rank with an explanation.

    The slowest rank is None if no rank stands out. Exposed communication is communication without simultaneous compute
    or data loading. At least one rank must be recorded.
    """
    known = [one for one in profiles if not one.unknown]
    window = max(one.began for one in known), min(one.ended for one in known)
    if window[0] >= window[1]:
        return {"seconds": 0.0, "shares": {}, "slowest": None, "sentence": "the ranks were recorded at different times"}
    shares = {one.rank: _shares(one, window) for one in known}
    slowest, sentence = _slowest(known, shares, window)
    return {"seconds": round(window[1] - window[0], 3), "shares": shares, "slowest": slowest, "sentence": sentence}


def _shares(one: RankProfile, window: Window) -> dict[str, float]:
    totals = dict.fromkeys(SHARES, 0.0)
    for (begin, what, communicates), (end, _, _) in pairwise(one.activities(window)):
        totals[what] += end - begin
        totals["communication"] += (end - begin) * communicates
    return {what: round(total / (window[1] - window[0]), 4) for what, total in totals.items()}


def _slowest(
    profiles: Sequence[RankProfile], shares: Mapping[int, Mapping[str, float]], window: Window
) -> tuple[int | None, str]:
    """Return the rank that waits least in collectives, or None, and a sentence that explains the result."""
    if len(profiles) < 2:
        return None, "there is no other rank to compare with"
    slow = min(profiles, key=lambda one: shares[one.rank]["exposed"])
    own = shares[slow.rank]
    others = {what: statistics.median(shares[one.rank][what] for one in profiles if one is not slow) for what in SHARES}
    if others["exposed"] - own["exposed"] < SLOWER:
        most_exposed = max(shares[one.rank]["exposed"] for one in profiles)
        if most_exposed - own["exposed"] < SLOWER:
            return None, "no rank is slow: all recorded ranks wait about the same time in collectives"
        return None, (
            f"no single rank is slow: the recorded ranks wait in collectives {100 * own['exposed']:.0f} % to "
            f"{100 * most_exposed:.0f} % of the time"
        )
    most = max(PHRASES, key=lambda what: own[what] - others[what])
    activities = slow.activities(window)
    seen = [stack for at, stack in slow.samples if activities[bisect(activities, (at, "~")) - 1][1] == most]
    places = Counter(filter(None, map(place_of, seen))).most_common(1)
    where = "".join(f"; it was at {place} in {count} of {len(seen)} samples" for place, count in places)
    return slow.rank, (
        f"{slow.who} is the slowest: it waits in collectives only {100 * own['exposed']:.0f} % of the time (the "
        f"others: {100 * others['exposed']:.0f} %). It spends {100 * own[most]:.0f} % of the time (the others: "
        f"{100 * others[most]:.0f} %) {PHRASES[most]}{where}"
    )


def summary_table(profiles: Sequence[RankProfile], all_shares: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return a table with one line per rank."""
    rows = [("RANK", "NODE", *(what.upper() for what in SHARES))]
    for one in profiles:
        shares = all_shares.get(one.rank)
        rows.append((str(one.rank), str(one.node), *(f"{shares[what]:.0%}" if shares else "-" for what in SHARES)))
    return table(rows)


def chrome_trace(profiles: Sequence[RankProfile], events: Sequence[Event] = ()) -> bytes:
    """Return a trace in Google's "Trace Event Format", as JSON that is compressed with gzip.

    Each rank is a process, and the run's events are instant events. Times are in µs since the first recording began.
    The events of a node are shown at its first rank. A flow connects an operator with its backward operator or its
    kernel. Other flows connect the calls of the same collective on all ranks.
    """
    known = [one for one in profiles if not one.unknown]
    began, ended = min(one.began for one in known), max(one.ended for one in known)
    first_tid = max(one.rank for one in known) + 1  # Perfetto shows a thread whose tid is its pid as the main thread
    found: list[dict[str, Any]] = []
    flows: dict[str, list[tuple[float, int, int]]] = defaultdict(list)

    def add(ph: str, pid: int, tid: int, name: str, **more: Any) -> None:
        found.append({"ph": ph, "pid": pid, "tid": tid, "name": name, **more})

    for one in known:
        add("M", one.rank, 0, "process_name", args={"name": one.who})
        threads: dict[str, int] = {}
        starts: dict[tuple[str, float], int] = {}
        calls = [(-math.inf, -math.inf, 0)]
        for part, label in lanes(one.slices):
            ts, end = (round((at - began) * 1e6, 1) for at in (part.begin, part.end))
            tid = starts[part.thread, part.begin] = threads.setdefault(label, first_tid + len(threads))
            calls += [(part.begin, part.end, tid)] if COLLECTIVE.match(part.name) else []
            add("X", one.rank, tid, part.name, ts=ts, dur=round(end - ts, 1), cat=part.kind)
        for label, tid in threads.items():
            add("M", one.rank, tid, "thread_name", args={"name": label})
        for name, thread, at in one.flows:
            begin, end, call = calls[bisect(calls, (at, math.inf)) - 1]
            flow_tid = starts.get((thread, at), 0) if thread else call if begin <= at <= end else 0
            flows[name] += [(at, one.rank, flow_tid)] if flow_tid else []
    for number, (name, points) in enumerate(flows.items()):
        for place, (at, rank, tid) in enumerate(sorted(points) if len(points) > 1 else ()):
            ph = "s" if place == 0 else "t" if place < len(points) - 1 else "f"
            add(ph, rank, tid, name, id=number, ts=round((at - began) * 1e6, 1), cat=name.partition(" ")[0], bp="e")
    for event in events:
        pid = next((one.rank for one in known if one.node == event.node and event.rank in (None, one.rank)), None)
        if began <= event.time <= ended and pid is not None:
            ts = round((event.time - began) * 1e6, 1)
            add("i", pid, 0, one_line(event.event), s="p", ts=ts, cat="ddpctl", args=dict(event.facts))
    return gzip.compress(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}).encode())


def lanes(slices: Sequence[Slice]) -> Iterator[tuple[Slice, str]]:
    """Yield each slice with the name of its row in the trace. The slices of a row are disjoint or nested.

    A slice that partly overlaps another slice of its thread, such as an asynchronous call, is put in another row.
    """
    ends: dict[str, list[float]] = defaultdict(list)
    for one in sorted(slices, key=lambda one: (one.begin, -one.end)):
        label = one.thread
        while True:
            while ends[label] and ends[label][-1] <= one.begin:
                ends[label].pop()
            if not ends[label] or one.end <= ends[label][-1]:
                break
            label += " +"
        ends[label].append(one.end)
        yield one, label
