"""What profile says of ranks, and its trace, from recordings as kineto and ddprun write them. Real ranks: tests/e2e."""

import base64
import gzip
import json
from typing import Any

from ddpctl.diagnosis.profile import RankProfile, chrome_trace, read_profile, summarise, summary_table

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
    summary = summarise([*read(waits(0), waits(1)), *read(waits(2), slow(3), node=1)])
    assert (summary["seconds"], summary["slowest"]) == (10.0, 3)
    assert summary["shares"][0] == {"compute": 0.2, "communication": 0.8, "exposed": 0.7, "data": 0.0, "idle": 0.1}
    assert summary["shares"][3] == {"compute": 0.2, "communication": 0.1, "exposed": 0.1, "data": 0.0, "idle": 0.7}
    assert [fact in summary["sentence"] for fact in ("rank 3 (node 1)", "train.py:7 (dawdle)", "7 of 7")] == [True] * 3


def test_no_thread_of_a_trace_has_the_number_of_its_process():
    events = json.loads(gzip.decompress(chrome_trace(read(*map(waits, range(4))))))["traceEvents"]
    assert [event["tid"] for event in events if event["ph"] == "X" and event["pid"] == event["tid"]] == []


def test_equal_ranks_and_ranks_without_an_answer():
    unknown = {"rank": 2, "unknown": "not recorded, because the script runs its own profiler"}
    profiles = read(waits(0), waits(1), unknown)
    summary = summarise(profiles)
    assert (summary["slowest"], sorted(summary["shares"]), profiles[2].unknown) == (None, [0, 1], unknown["unknown"])
    assert [row.split() for row in summary_table(profiles, summary["shares"])[1:]] == [
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
