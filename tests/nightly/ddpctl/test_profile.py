"""What profile says of ranks, and its trace, from recordings as kineto and ddprun write them. Real ranks: tests/e2e."""

import contextlib
import gzip
import json
import random
from collections import defaultdict
from typing import Any

import pytest
from tests.unit.ddpctl.test_profile import NOW, op, read, recorded, waits

from ddpctl.diagnosis.profile import RankProfile, Slice, chrome_trace, lanes, read_profile, summarise, summary_table
from ddpwire.events import Event

TORCH = "/venv/lib/python3.11/site-packages/torch/"
IN_LOADER = [[f"{TORCH}utils/data/dataloader.py", 1400, "_get_data"], ["/home/me/train.py", 11, "<module>"]]
IN_ALL_REDUCE = [[f"{TORCH}distributed/distributed_c10d.py", 4181, "all_reduce"], ["/home/me/train.py", 12, "main"]]


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


@pytest.mark.parametrize(("stack", "share"), [(IN_LOADER, "data"), (IN_ALL_REDUCE, "exposed")])
def test_a_wait_that_began_before_the_recording_is_known_from_where_the_code_is(stack, share):
    (only,) = read(recorded(0, stack=stack))
    shares = summarise([only])["shares"][0]
    assert (shares[share], shares["idle"]) == (0.9, pytest.approx(0.1))


def test_what_a_data_loader_computes_in_the_rank_is_data():
    batch = op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 2, 6, cat="user_annotation")
    summary = summarise(read(recorded(0, batch, op("aten::stack", 3, 5), op("aten::mm", 6, 9))))
    assert summary["shares"][0] == {"compute": 0.3, "communication": 0, "exposed": 0, "data": 0.4, "idle": 0.3}
    assert summary["slowest"] is None


def test_with_a_gpu_its_kernels_count():
    kernels = (
        op("sgemm", 1, 5, cat="kernel", tid="stream 7"),
        op("ncclDevKernel_AllReduce", 4, 8, cat="kernel", tid="stream 20"),
    )
    batch = op("enumerate(DataLoader)#x", 4, 6, cat="user_annotation")
    summary = summarise(read(recorded(0, *kernels, op("aten::mm", 0, 10), batch)))
    assert summary["shares"][0] == {"compute": 0.4, "communication": 0.4, "exposed": 0.2, "data": 0.1, "idle": 0.3}


def test_flows_lead_to_the_backward_and_through_the_ranks_of_a_collective():
    def rank(number: int, entered_s: float, *, group: str = "0") -> dict[str, Any]:
        call = op("c10d::allreduce_", entered_s - 0.1, entered_s + 0.1)
        forward, backward = op("aten::mm", 1, 2), op("MmBackward0", 3, 4)
        ends = [{"ph": ph, "id": 5, "cat": "fwdbwd", "name": "fwdbwd", "pid": 7, "tid": 7, "ts": at["ts"]}
                for ph, at in (("s", forward), ("f", backward))]  # fmt: skip
        only_start = ends[0] | {"id": 6}
        entries = [{"op": "all_reduce", "seq": seq, "group": group, "p2p": p2p, "at": NOW + at}
                   for seq, p2p, at in ((8, False, entered_s), (9, False, 9), (3, True, entered_s))]  # fmt: skip
        return recorded(number, forward, backward, call, *ends, only_start) | {"collectives": entries}

    trace = check_chrome_trace(chrome_trace(read(rank(0, 5), rank(1, 7), rank(2, 6), rank(3, 6, group="1"))))
    flows = [(event["ph"], event["name"], event["pid"], event["ts"]) for event in trace if event["ph"] in "stf"]
    name = "all_reduce #8 of group 0"
    through = [("s", name, 0, 5e6), ("t", name, 2, 6e6), ("f", name, 1, 7e6)]
    assert [flow for flow in flows if flow[1] == name] == through
    own = [(ph, f"fwdbwd 5 of rank {number}", number, at) for number in range(4) for ph, at in (("s", 1e6), ("f", 3e6))]
    assert [flow for flow in flows if flow[1] != name] == own


def test_slices_that_overlap_are_shown_apart():
    draw = random.Random(0)
    slices = []
    for number in range(300):
        begin = draw.randrange(1000) / 1e3
        slices.append(Slice("thread", NOW + begin, NOW + begin + draw.randrange(200) / 1e3, f"{number}", "cpu_op"))
    assert sorted(lane for lane, _ in lanes(slices)) == sorted(slices)
    rank = RankProfile(rank=0, node=0, began=NOW, ended=NOW + 2, slices=slices)
    trace = check_chrome_trace(chrome_trace([rank]))
    assert sum(event["ph"] == "X" for event in trace) == len(slices)
    nested = [Slice("thread", NOW, NOW + 3, "a", ""), Slice("thread", NOW + 1, NOW + 2, "b", "")]
    assert {label for _, label in lanes(nested)} == {"thread"}


def test_a_damaged_answer_is_one_kind_of_error():
    whole = json.dumps({"node": 0, "ranks": [waits(0)], "request": "x"})
    draw = random.Random(0)
    damaged = [""]
    for _ in range(200):
        place = draw.randrange(len(whole))
        damaged += [whole[:place], whole[:place] + whole[place + 1 :], whole[:place] + "7" + whole[place + 1 :]]
    for text in damaged:
        with contextlib.suppress(ValueError):
            read_profile(text, clock_offset_s=0.0)


def test_a_trace_has_one_clock_for_all_nodes_and_the_events_of_the_run():
    events = [
        Event(event="checkpoint_saved", time=NOW + 4, node=1, rank=2, facts={"bytes": 5}),
        Event(event="restart", time=NOW + 5, node=1),
        Event(event="too_old", time=NOW - 5, node=1),
    ]
    profiles = [*read(waits(0)), *read(waits(2, late_s=3.5), node=1, offset_s=3.5)]
    trace = check_chrome_trace(chrome_trace(profiles, events))
    at = {(event["pid"], event["name"]): event["ts"] for event in trace if event["ph"] in "Xi"}
    assert at[0, "gloo:all_reduce"] == at[2, "gloo:all_reduce"] == pytest.approx(1e6, abs=1)
    assert (at[2, "checkpoint_saved"], at[2, "restart"]) == (4e6, 5e6)
    assert not any(name == "too_old" for _, name in at)
    assert summarise(profiles)["seconds"] == pytest.approx(10, abs=0.01)


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
