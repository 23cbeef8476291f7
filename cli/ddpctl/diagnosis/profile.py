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
# For calls without a slice, because they last longer than the recording.
SAMPLED = {"in_loader": "data", "in_collective": "exposed"}
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
        on_gpu = any(part.kind in GPU_KINDS for part in self.slices)
        order = (*(("compute", "data") if on_gpu else ("data", "compute")), "exposed", *SAMPLED)
        edges = []
        for part in self.slices:
            begin, end = max(part.begin, window[0]), min(part.end, window[1])
            if begin < end and (activity := _activity_of(part, on_gpu=on_gpu)):
                edges += [(begin, 1, activity), (end, -1, activity)]
        active: Counter[str] = Counter()
        changes = [(window[0], "idle", False)]
        for at, step, activity in sorted(edges):
            active[activity] += step
            now = next((SAMPLED.get(activity, activity) for activity in order if active[activity]), "idle")
            changes.append((at, now, now == "exposed" or active["exposed"] > 0))
        return [*changes, (window[1], "idle", False)]


def _activity_of(part: Slice, *, on_gpu: bool) -> str:
    if part.kind in SAMPLED:
        return part.kind
    if COLLECTIVE.match(part.name):
        return "exposed" if on_gpu == (part.kind == "kernel") else ""
    if part.name.startswith("enumerate(DataLoader)"):
        return "data"
    return "compute" if (part.kind in GPU_KINDS if on_gpu else part.kind == "cpu_op") else ""


def read_profile(text: str, *, clock_offset_s: float) -> list[RankProfile]:
    """Return the ranks in a profile.json. Raises ValueError if it is damaged."""
    try:
        answer = parse_json(text)
        return [_read_rank(recording, int(answer["node"]), clock_offset_s) for recording in answer["ranks"]]
    except (LookupError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"damaged: {error}") from None


def _read_rank(recording: Mapping[str, Any], node: int, offset_s: float) -> RankProfile:
    rank = int(recording["rank"])
    if "unknown" in recording:
        return RankProfile(rank=rank, node=node, unknown=one_line(str(recording["unknown"])))
    with gzip.open(io.BytesIO(base64.b64decode(recording["trace"]))) as file:
        trace = parse_json(file.read(MAX_TRACE_BYTES))
    base_s = float(trace.get("baseTimeNanoseconds", 0)) / 1e9 - offset_s
    threads: dict[tuple[str, str], str] = {}
    slices, flows = [], []
    # M (names of threads) before X (slices).
    for event in sorted(trace["traceEvents"], key=lambda event: str(event["ph"])):
        key = str(event.get("pid")), str(event.get("tid"))
        thread = threads.get(key, f"thread {key[1]}")
        begin = base_s + float(event.get("ts", 0)) / 1e6
        if event["ph"] == "M" and event["name"] == "thread_name":
            threads[key] = one_line(str(event["args"]["name"]))
        elif event["ph"] == "X" and event.get("cat") in KINDS:
            end = base_s + (float(event["ts"]) + float(event["dur"])) / 1e6
            name = one_line(str(event["name"]))
            slices.append(Slice(thread=thread, begin=begin, end=end, name=name, kind=str(event["cat"])))
        elif event["ph"] in ("s", "f"):
            flows.append((one_line(f"{event['cat']} {event['id']} of rank {rank}"), thread, begin))
    for collective in recording.get("collectives", ()):
        if not collective["p2p"]:
            name = one_line(f"{collective['op']} #{collective['seq']} of group {collective['group']}")
            flows.append((name, "", float(collective["at"]) - offset_s))
    samples = [
        (float(at) - offset_s, tuple((str(file), int(line), str(function)) for file, line, function in stack))
        for at, stack in recording["samples"]
    ]
    for (at, stack), (end, _) in pairwise(samples):
        kind = "in_loader" if has_file(stack, LOADER) else "in_collective" if has_file(stack, COLLECTIVES) else "python"
        name = place_of(stack) or "unknown"
        slices.append(Slice(thread="Python, sampled", begin=at, end=end, name=name, kind=kind))
    began, ended = float(recording["began"]) - offset_s, float(recording["ended"]) - offset_s
    return RankProfile(rank=rank, node=node, began=began, ended=ended, slices=slices, samples=samples, flows=flows)


def summarise(profiles: Sequence[RankProfile]) -> dict[str, Any]:
    """Return the length of the common time span, the shares of each rank, and the slowest rank with an explanation.

    The slowest rank is None if no rank stands out. Exposed communication is communication without simultaneous compute
    or data loading. At least one rank must be recorded.
    """
    known = [profile for profile in profiles if not profile.unknown]
    window = max(profile.began for profile in known), min(profile.ended for profile in known)
    if window[0] >= window[1]:
        return {"seconds": 0.0, "shares": {}, "slowest": None, "sentence": "the ranks were recorded at different times"}
    shares = {profile.rank: _shares(profile, window) for profile in known}
    slowest, sentence = _slowest(known, shares, window)
    return {"seconds": round(window[1] - window[0], 3), "shares": shares, "slowest": slowest, "sentence": sentence}


def _shares(profile: RankProfile, window: Window) -> dict[str, float]:
    totals = dict.fromkeys(SHARES, 0.0)
    for (begin, activity, communicates), (end, _, _) in pairwise(profile.activities(window)):
        totals[activity] += end - begin
        totals["communication"] += (end - begin) * communicates
    return {activity: round(total / (window[1] - window[0]), 4) for activity, total in totals.items()}


def _slowest(
    profiles: Sequence[RankProfile], shares: Mapping[int, Mapping[str, float]], window: Window
) -> tuple[int | None, str]:
    """Return the rank that waits least in collectives, or None, and a sentence that explains the result."""
    if len(profiles) < 2:
        return None, "there is no other rank to compare with"
    slow = min(profiles, key=lambda profile: shares[profile.rank]["exposed"])
    own = shares[slow.rank]
    of_others = [shares[profile.rank] for profile in profiles if profile is not slow]
    others = {name: statistics.median(of_rank[name] for of_rank in of_others) for name in SHARES}
    if others["exposed"] - own["exposed"] < SLOWER:
        most_exposed = max(shares[profile.rank]["exposed"] for profile in profiles)
        if most_exposed - own["exposed"] < SLOWER:
            return None, "no rank is slow: all recorded ranks wait about the same time in collectives"
        return None, (
            f"no single rank is slow: the recorded ranks wait in collectives {100 * own['exposed']:.0f} % to "
            f"{100 * most_exposed:.0f} % of the time"
        )
    most = max(PHRASES, key=lambda activity: own[activity] - others[activity])
    activities = slow.activities(window)
    stacks = [stack for at, stack in slow.samples if activities[bisect(activities, (at, "~")) - 1][1] == most]
    places = Counter(filter(None, map(place_of, stacks))).most_common(1)
    where = "".join(f"; it was at {place} in {count} of {len(stacks)} samples" for place, count in places)
    return slow.rank, (
        f"{slow.who} is the slowest: it waits in collectives only {100 * own['exposed']:.0f} % of the time (the "
        f"others: {100 * others['exposed']:.0f} %). It spends {100 * own[most]:.0f} % of the time (the others: "
        f"{100 * others[most]:.0f} %) {PHRASES[most]}{where}"
    )


def summary_table(profiles: Sequence[RankProfile], all_shares: Mapping[int, Mapping[str, float]]) -> list[str]:
    """Return a table with one line per rank."""
    rows = [("RANK", "NODE", *map(str.upper, SHARES))]
    for profile in profiles:
        shares = all_shares.get(profile.rank)
        cells = [f"{shares[name]:.0%}" if shares else "-" for name in SHARES]
        rows.append((str(profile.rank), str(profile.node), *cells))
    return table(rows)


def chrome_trace(profiles: Sequence[RankProfile], events: Sequence[Event] = ()) -> bytes:
    """Return a trace in Google's "Trace Event Format", as JSON that is compressed with gzip.

    Each rank is a process, and the run's events are instant events. Times are in µs since the first recording began.
    The events of a node are shown at its first rank. A flow connects an operator with its backward operator or its
    kernel. Other flows connect the calls of the same collective on all ranks.
    """
    known = [profile for profile in profiles if not profile.unknown]
    began, ended = min(profile.began for profile in known), max(profile.ended for profile in known)
    # Perfetto shows a thread whose tid is its pid as the main thread.
    first_tid = max(profile.rank for profile in known) + 1
    trace_events: list[dict[str, Any]] = []
    flows: dict[str, list[tuple[float, int, int]]] = defaultdict(list)

    def add(ph: str, pid: int, tid: int, name: str, **more: Any) -> None:
        trace_events.append({"ph": ph, "pid": pid, "tid": tid, "name": name, **more})

    for profile in known:
        add("M", profile.rank, 0, "process_name", args={"name": profile.who})
        threads: dict[str, int] = {}
        starts: dict[tuple[str, float], int] = {}
        calls = [(-math.inf, -math.inf, 0)]
        for part, label in lanes(profile.slices):
            ts, end = (round((at - began) * 1e6, 1) for at in (part.begin, part.end))
            tid = starts[part.thread, part.begin] = threads.setdefault(label, first_tid + len(threads))
            calls += [(part.begin, part.end, tid)] if COLLECTIVE.match(part.name) else []
            add("X", profile.rank, tid, part.name, ts=ts, dur=round(end - ts, 1), cat=part.kind)
        for label, tid in threads.items():
            add("M", profile.rank, tid, "thread_name", args={"name": label})
        for name, thread, at in profile.flows:
            begin, end, call = calls[bisect(calls, (at, math.inf)) - 1]
            flow_tid = starts.get((thread, at), 0) if thread else call if begin <= at <= end else 0
            flows[name] += [(at, profile.rank, flow_tid)] if flow_tid else []
    for number, (name, points) in enumerate(flows.items()):
        for place, (at, rank, tid) in enumerate(sorted(points) if len(points) > 1 else ()):
            ph = "s" if place == 0 else "t" if place < len(points) - 1 else "f"
            add(ph, rank, tid, name, id=number, ts=round((at - began) * 1e6, 1), cat=name.partition(" ")[0], bp="e")
    for event in events:
        ranks = (profile.rank for profile in known if profile.node == event.node)
        pid = next((rank for rank in ranks if event.rank in (None, rank)), None)
        if began <= event.time <= ended and pid is not None:
            ts = round((event.time - began) * 1e6, 1)
            add("i", pid, 0, one_line(event.event), s="p", ts=ts, cat="ddpctl", args=dict(event.facts))
    return gzip.compress(json.dumps({"traceEvents": trace_events, "displayTimeUnit": "ms"}).encode())


def lanes(slices: Sequence[Slice]) -> Iterator[tuple[Slice, str]]:
    """Yield each slice with the name of its row in the trace. The slices of a row are disjoint or nested.

    A slice that partly overlaps another slice of its thread, such as an asynchronous call, is put in another row.
    """
    ends: dict[str, list[float]] = defaultdict(list)
    for part in sorted(slices, key=lambda part: (part.begin, -part.end)):
        label = part.thread
        while True:
            while ends[label] and ends[label][-1] <= part.begin:
                ends[label].pop()
            if not ends[label] or part.end <= ends[label][-1]:
                break
            label += " +"
        ends[label].append(part.end)
        yield part, label
