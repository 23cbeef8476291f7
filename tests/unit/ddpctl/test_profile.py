"""What profile says of ranks, and its trace, from recordings as kineto and ddprun write them. Real ranks: tests/e2e."""

import base64
import gzip
import json
from collections import defaultdict
from typing import Any

import pytest

from ddpctl.profile import RankProfile, chrome_trace, read_profile, summarise, summary_table
from ddpwire.events import Event

NOW = 1_800_000_000.0
BASE_NS = 1_790_000_000_000_000_000
SLEEP = [["/home/me/train.py", 7, "dawdle"], ["/home/me/train.py", 12, "<module>"]]


def op(name: str, begin_s: float, end_s: float, *, cat: str = "cpu_op", tid: Any = 7) -> dict[str, Any]:
    ts = (NOW + begin_s - BASE_NS / 1e9) * 1e6
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": ts, "dur": (end_s - begin_s) * 1e6}


def recorded(rank: int, *events: dict[str, Any], stack: list[list[Any]] = SLEEP, late_s: float = 0.0) -> dict[str, Any]:
    """Ten seconds of a rank, whose clock is ``late_s`` ahead of node 0's."""
    named = [{"ph": "M", "name": "thread_name", "pid": 7, "tid": 7, "args": {"name": "thread 7 (python)"}}]
    moved = [event | {"ts": event["ts"] + late_s * 1e6} for event in events]
    trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [*moved, *named]}
    data = base64.b64encode(gzip.compress(json.dumps(trace).encode())).decode()
    samples = [(NOW + late_s + second + 0.5, stack) for second in range(10)]
    return {"rank": rank, "began": NOW + late_s, "ended": NOW + late_s + 10, "samples": samples, "trace": data}


def read(*ranks: dict[str, Any], node: int = 0, offset_s: float = 0.0) -> list[RankProfile]:
    return read_profile(json.dumps({"node": node, "ranks": ranks, "request": "x"}), clock_offset_s=offset_s)


def waits(rank: int, **more: Any) -> dict[str, Any]:
    """A rank that computes for 2 s, communicates for 7 s, of which 1 s while it computes, and then does nothing."""
    everything = (op("aten::mm", 0, 2), op("aten::inner", 0.5, 1), op("gloo:all_reduce", 1, 8, cat="user_annotation",
                  tid=9), op("c10d::allreduce_", 8, 9))  # fmt: skip
    return recorded(rank, *everything, **more)


def slow(rank: int, *, stack: list[list[Any]] = SLEEP) -> dict[str, Any]:
    return recorded(rank, op("aten::mm", 0, 2), op("gloo:all_reduce", 9, 10, cat="user_annotation", tid=9), stack=stack)


def test_the_slowest_rank_is_named_with_what_it_does():
    found = summarise([*read(waits(0), waits(1)), *read(waits(2), slow(3), node=1)])
    assert (found["seconds"], found["slowest"]) == (10.0, 3)
    assert found["shares"][0] == {"compute": 0.2, "communication": 0.8, "exposed": 0.7, "data": 0.0, "idle": 0.1}
    assert found["shares"][3] == {"compute": 0.2, "communication": 0.1, "exposed": 0.1, "data": 0.0, "idle": 0.7}
    assert [fact in found["sentence"] for fact in ("rank 3 (node 1)", "train.py:7 (dawdle)", "7 of 7")] == [True] * 3


def test_equal_ranks_and_ranks_without_an_answer():
    unknown = {"rank": 2, "unknown": "not recorded, because the script runs its own profiler"}
    profiles = read(waits(0), waits(1), unknown)
    found = summarise(profiles)
    assert (found["slowest"], sorted(found["shares"]), profiles[2].unknown) == (None, [0, 1], unknown["unknown"])
    assert [row.split() for row in summary_table(profiles, found["shares"])[1:]] == [
        ["0", "0", "20%", "80%", "70%", "0%", "10%"],
        ["1", "0", "20%", "80%", "70%", "0%", "10%"],
        ["2", "0", "-", "-", "-", "-", "-"],
    ]
    busy = [recorded(rank, op("aten::mm", 0, 10)) for rank in (3, 4, 5)]
    one_waits = summarise(read(waits(0), *busy))
    assert one_waits["slowest"] is None
    assert "0 % to 70 %" in one_waits["sentence"]
    apart = summarise([*read(waits(0)), *read(waits(1), node=1, offset_s=60.0)])
    assert (apart["seconds"], apart["shares"], apart["slowest"]) == (0.0, {}, None)


def check_chrome_trace(data: bytes) -> list[dict[str, Any]]:
    """Hold a trace against the format: names, one clock, slices that nest, flows that match. Return its events."""
    events = json.loads(gzip.decompress(data))["traceEvents"]
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    threads, flows = defaultdict(list), defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] in "MXistf"
        assert ("process_name", event["pid"], 0) in named
        if event["ph"] == "X":
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert event["tid"] != event["pid"], "Perfetto takes such a thread for the main thread"
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
        if event["ph"] == "i":
            assert event["s"] == "p"
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    for points in flows.values():
        assert [event["ph"] for event in points] == ["s", *"t" * (len(points) - 2), "f"]
        assert points == sorted(points, key=lambda event: event["ts"])
        assert len({(event["name"], event["cat"], event["bp"]) for event in points}) == 1
        for event in points:
            slices = threads[event["pid"], event["tid"]]
            assert any(ts <= event["ts"] <= ts - minus_dur + 0.01 for ts, minus_dur in slices), event
    for slices in threads.values():
        ends: list[float] = []
        for ts, minus_dur in sorted(slices):
            while ends and ends[-1] <= ts + 0.01:
                ends.pop()
            assert not ends or ts - minus_dur <= ends[-1] + 0.01
            ends.append(ts - minus_dur)
    return events


def test_a_trace_has_one_clock_for_all_nodes_and_the_events_of_the_run():
    events = [
        Event(event="checkpoint_saved", time=NOW + 4, node=1, rank=2, facts={"bytes": 5}),
        Event(event="restart", time=NOW + 5, node=1),
        Event(event="too_old", time=NOW - 5, node=1),
    ]
    profiles = [*read(waits(0)), *read(waits(2, late_s=3.5), node=1, offset_s=3.5)]
    found = check_chrome_trace(chrome_trace(profiles, events))
    at = {(event["pid"], event["name"]): event["ts"] for event in found if event["ph"] in "Xi"}
    assert at[0, "gloo:all_reduce"] == at[2, "gloo:all_reduce"] == pytest.approx(1e6, abs=1)
    assert (at[2, "checkpoint_saved"], at[2, "restart"]) == (4e6, 5e6)
    assert not any(name == "too_old" for _, name in at)
    assert summarise(profiles)["seconds"] == pytest.approx(10, abs=0.01)
