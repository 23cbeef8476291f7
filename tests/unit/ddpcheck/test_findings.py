"""What is made of the findings of nodes: who is to blame, what is the same, who is slow, which links are suspected."""

import json
import os
import threading
import time
from dataclasses import asdict, replace
from itertools import combinations

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from ddpcheck import doctor, finding, links, network_checks, node_checks
from ddpcheck.collectives import Ranks
from ddpcheck.links import Pair, Suspect, rounds, suspected_links, suspected_nodes
from ddpcheck.network_checks import Node, Paths
from ddpcheck.node_checks import CpuSpeed

GOOD_CPU = CpuSpeed(gflops=50, copy_bytes=1e10, share=0.99, idle=1.0, others=0.1, throttled=0)


def nodes(count):
    return [
        Node(node=n, host=f"box{n}", address=f"10.0.0.{n}", tcp=40000 + n, udp=1, mtu=1500, machine=f"m{n}")
        for n in range(count)
    ]


def paths(count, **changed):
    names = {n: f"10.0.0.{n}" for n in range(count)}
    whole = {n: Paths(names=names, mtu={m: 1500 for m in range(count) if m != n}) for n in range(count)}
    return whole | {int(node[1:]): replace(whole[int(node[1:])], **change) for node, change in changed.items()}


def statuses(findings, check):
    return {result.node: result.status for result in findings if result.check == check and result.status != "ok"}


@pytest.mark.parametrize(
    ("failed", "count", "blamed"),
    [
        ([(0, 3), (1, 3), (2, 3)], 4, {3}),
        ([(a, b) for a in range(4) for b in range(4) if a != b], 4, {0, 1, 2, 3}),
        ([(0, 3), (1, 3), (2, 3), (3, 1)], 4, {3}),
        ([(1, 2)], 4, {2}),
        ([], 4, set()),
    ],
)
def test_the_fewest_nodes_that_explain_all_pairs_are_blamed(failed, count, blamed):
    assert set(network_checks.blame(failed, range(count))) == blamed


def test_each_fault_of_a_network_is_put_down_to_its_node():
    findings = [*network_checks.judge(nodes(4), paths(4))]
    assert all(result.status == "ok" for result in findings)
    small = {"mtu": {0: 1500, 1: 1400, 3: 1500}}  # node 2 to node 1
    faults = paths(4, n2=small, n0={"mtu": {1: 1380, 2: 1500, 3: 1500}}, n3={"closed": {2: "refused"}})
    findings = [*network_checks.judge(nodes(4), faults)]
    assert statuses(findings, "path MTU") == {1: "bad"}
    value = next(result.value for result in findings if (result.check, result.node) == ("path MTU", 1))
    assert value == "packets of 1420 bytes do not pass between it and nodes 0, 2, those of 1380 bytes do"
    assert statuses(findings, "ports") == {2: "bad"}
    names = paths(3, n1={"names": {0: "127.0.1.1", 1: "10.0.0.1", 2: ""}}, n2={"names": {2: "127.0.1.1"}})
    findings = [*network_checks.judge(nodes(3), names)]
    assert statuses(findings, "names") == {1: "bad", 2: "warning"}  # Debian's line for a machine's own name


def test_a_clock_is_wrong_by_what_most_clocks_say():
    off = {0: 0.0, 1: -60.0, 2: -60.1, 3: -59.9}
    assert statuses(network_checks.judge_clocks(off), "clock") == {0: "bad"}
    assert statuses(network_checks.judge_clocks({0: 0.0, 1: 3.0}), "clock") == {1: "warning"}


def test_a_build_is_stale_by_what_most_nodes_have():
    new, old = {"NCCL": "2.30.7", "libnccl.so.2": "a" * 64}, {"NCCL": "2.30.7", "libnccl.so.2": "b" * 64}
    findings = [*finding.compare_builds("libraries", {0: old, 1: new, 2: new})]
    assert statuses(findings, "libraries") == {0: "bad"}
    assert findings[0].value == f"libnccl.so.2 {'b' * 12}, elsewhere {'a' * 12}"
    patches = {0: {"driver": "570.86.15"}, 1: {"driver": "570.86.10"}, 2: {"driver": "570.86.15"}}
    assert statuses(finding.compare_builds("driver", patches), "driver") == {1: "warning"}


@pytest.mark.parametrize(
    ("speeds", "loaded", "slow"),
    [
        ({0: 100, 1: 99, 2: 101, 3: 45}, (), {3: "bad"}),
        ({0: 100, 1: 99, 2: 101, 3: 45}, (3,), {3: "warning"}),
        ({0: 100, 1: 45}, (), {1: "warning"}),
        ({0: 100, 1: 85, 2: 90}, (), {}),
    ],
)
def test_a_node_is_slow_by_the_median_of_the_others(speeds, loaded, slow):
    findings = finding.compare_speed("CPU matmul", speeds, "GFLOP/s", loaded=loaded)
    assert statuses(findings, "CPU matmul") == slow


def report(**changed):
    given = {"findings": (), "builds": {}, "speeds": {}, "loaded": False, "paths": Paths(), "clock_s": 0.0}
    return doctor.Report(**(given | changed))


def test_a_late_report_is_read_and_a_node_that_says_nothing_is_listed(monkeypatch, tmp_path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = PrefixStore("doctor", store.clone())
    environ = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "DDP_DEVICE": "cpu"}
    for name, value in (environ | {"DDP_RUN_DIR": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(doctor, "rendezvous", lambda *_, **__: iter([(store, 0, 4)]))
    monkeypatch.setattr(doctor.node_checks, "measure_cpu", lambda: GOOD_CPU)
    monkeypatch.setattr(doctor.clock, "answer_requests", lambda _: None)
    ports = network_checks.open_ports("127.0.0.1")
    monkeypatch.setattr(network_checks, "open_ports", lambda _: ports)
    monkeypatch.setattr(doctor, "MEET_S", 1.0)
    monkeypatch.setattr(doctor, "STAGE_S", 0.1)
    for node in nodes(3)[1:]:
        doctor._put(
            other, f"hello/{node.node}", json.dumps(asdict(replace(node, host="localhost", address="127.0.0.1")))
        )
        doctor._put(other, f"tried/{node.node}", "")

    def answer():
        doctor._put(other, "report/1", json.dumps(asdict(report())))
        doctor._wait(other, "report/0", 60)
        time.sleep(1)  # later than STAGE_S
        doctor._put(other, "report/2", json.dumps(asdict(report())))

    answering = threading.Thread(target=answer)
    answering.start()
    result = doctor.main(None)
    assert result is not None
    answering.join()
    ports[0].close()
    assert [node["node"] for node in result["nodes"]] == [0, 1, 2, 3]
    answers = [(entry["node"], entry["status"]) for entry in result["results"] if entry["check"] == "answer"]
    assert answers == [(3, "bad")]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"share": 0.3, "idle": 1.6}, "bad"),  # cores are idle, and it does not get them
        ({"share": 0.3, "idle": 0.0, "others": 1.9}, "warning"),
        ({"share": 0.3, "idle": 0.0, "others": 1.9, "throttled": 0.4}, "bad"),
        ({"share": 0.746, "idle": 0.2, "others": 1.1}, "warning"),  # short pauses of a busy machine
    ],
)
def test_a_quota_is_bad_and_the_load_of_others_is_not(change, status):
    assert node_checks.check_cpu(replace(GOOD_CPU, **change)).status == status


def test_a_path_is_tried_over_real_sockets():
    tcp, udp = network_checks.open_ports("127.0.0.1")
    peer = replace(
        nodes(2)[1], address="127.0.0.1", tcp=tcp.getsockname()[1], udp=udp.getsockname()[1], host="localhost"
    )
    me = replace(nodes(2)[0], address="127.0.0.2", host="localhost")
    assert network_checks.try_paths(me, [me, peer]) == Paths(
        mtu={1: 1500}, announced={1: False}, names={0: "127.0.0.1", 1: "127.0.0.1"}
    )
    tcp.close()
    assert network_checks.try_paths(me, [me, peer]).closed == {1: os.strerror(111)}


@pytest.mark.parametrize(("used", "loaded", "slow"), [(True, False, "warning"), (False, True, "bad")])
def test_a_gpu_that_another_program_uses_is_not_bad_because_it_is_slow(used, loaded, slow):
    processes = finding.Finding("GPU processes", "warning" if used else "ok", "used by pid 4711" if used else "none")
    reports = {node: report(speeds={"GPU matmul": 700.0}) for node in (0, 1)}
    reports[2] = report(findings=(processes,), speeds={"GPU matmul": 330.0}, loaded=loaded)
    assert statuses(doctor.judge(nodes(3), reports), "GPU matmul") == {2: slow}


@pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 13])
def test_each_two_meet_once_and_nobody_is_in_two_pairs_at_once(number: int) -> None:
    played = [*rounds(number)]
    assert len(played) == number - 1 + number % 2
    assert sorted(pair for pairs in played for pair in pairs) == [*combinations(range(number), 2)]
    for pairs in played:
        busy = [node for pair in pairs for node in pair]
        assert len({*busy}) == len(busy) == number - number % 2


def figures(number: int, slow: dict[Pair, float]) -> dict[Pair, float]:
    return {pair: slow.get(pair, 1.0 + sum(pair) / 100) for pair in combinations(range(number), 2)}


def of_node(number: int, *nodes: int) -> dict[Pair, float]:
    return {pair: 0.1 for pair in combinations(range(number), 2) if {*pair} & {*nodes}}


def suspected(number: int, slow: dict[Pair, float]) -> tuple[list[tuple[int, ...]], bool]:
    nodes, note = suspected_nodes(figures(number, slow), number)
    links, more = suspected_links(figures(number, slow), number, [suspect.members[0] for suspect in nodes])
    suspects = (*nodes, *links)
    for suspect in suspects:
        assert not {suspect.pair} & {*suspect.beside}
        assert all({*suspect.pair} & {*pair} for pair in suspect.beside)
    return [suspect.members for suspect in suspects], bool(note or more)


def test_a_slow_link_or_node_is_suspected_and_nothing_sound() -> None:
    for number in (3, 4, 5, 9):
        assert suspected(number, {}) == ([], False)
        assert suspected(number, {(0, 2): 0.4}) == ([(0, 2)], False)
        assert suspected(number, {(0, 2): 0.7}) == ([], False)
        assert suspected(number, of_node(number, 1)) == ([(1,)], False)
    assert suspected(6, {(0, 2): 0.3, (1, 4): 0.2}) == ([(1, 4), (0, 2)], False)
    assert suspected(6, of_node(6, 1, 4)) == ([(1,), (4,)], False)
    assert suspected(8, of_node(8, 5) | {(0, 1): 0.2}) == ([(5,), (0, 1)], False)


def test_a_suspect_is_named_if_it_is_slow_alone_too() -> None:
    def is_slow(*measured: tuple[float, float]) -> bool:
        return Suspect(members=(0, 1), pair=(0, 1), beside=((0, 2),), figures=measured).is_slow

    assert is_slow((0.1, 1.0), (0.2, 0.9), (0.1, 0.1))  # once the link beside it was held up
    assert not is_slow((0.1, 1.0), (0.6, 1.0), (0.1, 1.0))  # it can be quicker
    assert not is_slow((0.1, 0.1), (0.1, 1.0), (0.1, 0.1))


def test_a_send_that_ends_in_a_buffer_makes_no_link_fast(monkeypatch):
    monkeypatch.setattr(links.dist, "send", lambda *_, **__: None)
    monkeypatch.setattr(links.dist, "recv", lambda *_, **__: time.sleep(0.02))
    ranks = Ranks(rank=0, device=torch.device("cpu"), nodes=(0, 1), hosts=("box0", "box1"), group=None)
    assert links._exchange(ranks, 1, first=True) < 2 * links.BYTES["cpu"] / 0.02 / 1e9
