"""What is made of the nodes' findings: who is to blame, what is the same, who is slow, when a core is held back."""

import os
import threading
from dataclasses import replace

import pytest

from ddpcheck import doctor, finding, network_checks, node_checks
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
    return {one.node: one.status for one in findings if one.check == check and one.status != "ok"}


@pytest.mark.parametrize(
    ("failed", "count", "blamed"),
    [
        ([(0, 3), (1, 3), (2, 3)], 4, {3}),
        ([(3, 0), (3, 1), (3, 2)], 4, {3}),
        ([(a, b) for a in range(4) for b in range(4) if a != b], 4, {0, 1, 2, 3}),
        ([(0, 3), (1, 3), (2, 3), (3, 1)], 4, {3}),
        ([(0, 2), (1, 2), (3, 2), (0, 3), (1, 3), (2, 3)], 4, {2, 3}),
        ([(1, 2)], 4, {2}),
        ([(0, 1)], 2, {1}),
        ([], 4, set()),
    ],
)
def test_the_fewest_nodes_that_explain_all_pairs_are_blamed(failed, count, blamed):
    assert set(network_checks.blame(failed, range(count))) == blamed


def test_each_fault_of_a_network_is_put_down_to_its_node():
    found = [*network_checks.judge(nodes(4), paths(4))]
    assert all(one.status == "ok" for one in found)
    small = {"mtu": {0: 1500, 1: 1400, 3: 1500}}  # node 2 to node 1
    one = paths(4, n2=small, n0={"mtu": {1: 1400, 2: 1500, 3: 1500}}, n3={"closed": {2: "refused"}})
    found = [*network_checks.judge(nodes(4), one)]
    assert statuses(found, "path MTU") == {1: "bad"}
    assert statuses(found, "ports") == {2: "bad"}
    announced = paths(2, n0={"mtu": {1: 1400}, "announced": {1: True}})
    assert statuses(network_checks.judge(nodes(2), announced), "path MTU") == {1: "warning"}
    silent = paths(3, n2={"mtu": {}})
    assert statuses(network_checks.judge(nodes(3), silent), "path MTU") == {2: "not looked at"}
    names = paths(3, n1={"names": {0: "127.0.1.1", 1: "10.0.0.1", 2: ""}}, n2={"names": {2: "127.0.1.1"}})
    found = [*network_checks.judge(nodes(3), names)]
    assert statuses(found, "names") == {1: "bad", 2: "warning"}  # Debian's line for a machine's own name
    same = [replace(one, host="box") for one in nodes(3)]  # cloned machines, each with Debian's line
    cloned = {n: Paths(names=dict.fromkeys(range(3), "127.0.1.1")) for n in range(3)}
    assert statuses(network_checks.judge(same, cloned), "names") == dict.fromkeys(range(3), "warning")
    unknown = {n: Paths(names=dict.fromkeys(range(3), "")) for n in range(3)}
    assert statuses(network_checks.judge(nodes(3), unknown), "names") == {}


def test_a_clock_is_wrong_by_what_most_clocks_say():
    off = {0: 0.0, 1: -60.0, 2: -60.1, 3: -59.9}
    assert statuses(network_checks.judge_clocks(off), "clock") == {0: "bad"}
    assert statuses(network_checks.judge_clocks({0: 0.0, 1: 3.0}), "clock") == {1: "warning"}


def test_a_build_is_stale_by_what_most_nodes_have():
    new, old = {"NCCL": "2.30.7", "libnccl.so.2": "a" * 64}, {"NCCL": "2.30.7", "libnccl.so.2": "b" * 64}
    found = [*finding.compare_builds("libraries", {0: old, 1: new, 2: new})]
    assert statuses(found, "libraries") == {0: "bad"}
    assert found[0].value == f"libnccl.so.2 {'b' * 12}, elsewhere {'a' * 12}"
    halves = [*finding.compare_builds("libraries", {0: new, 1: new, 2: old, 3: old})]
    assert [one.value.endswith("not known which is right)") for one in halves] == [False, False, True, True]
    patches = {0: {"driver": "570.86.15"}, 1: {"driver": "570.86.10"}, 2: {"driver": "570.86.15"}}
    assert statuses(finding.compare_builds("driver", patches), "driver") == {1: "warning"}
    assert statuses(finding.compare_builds("GPUs", {0: {"driver": "570.1"}, 1: {"driver": "550.1"}}), "GPUs") == {
        1: "bad"
    }


@pytest.mark.parametrize(
    ("speeds", "loaded", "slow"),
    [
        ({0: 100, 1: 99, 2: 101, 3: 45}, (), {3: "bad"}),
        ({0: 100, 1: 99, 2: 101, 3: 45}, (3,), {3: "warning"}),
        ({0: 100, 1: 99, 2: 101, 3: 75}, (), {3: "warning"}),
        ({0: 100, 1: 45}, (), {1: "warning"}),
        ({0: 100}, (), {}),
        ({0: 100, 1: 85, 2: 90}, (), {}),
    ],
)
def test_a_node_is_slow_by_the_median_of_the_others(speeds, loaded, slow):
    found = finding.compare_speed("CPU matmul", speeds, "GFLOP/s", loaded=loaded)
    assert statuses(found, "CPU matmul") == slow


def test_a_speed_is_a_share_of_the_others_rounded_down():
    (_, _, slow) = finding.compare_speed("CPU matmul", {0: 100, 1: 100, 2: 79.9}, "GFLOP/s")
    assert slow.value == "79.9 GFLOP/s, 79 % of the others' median"


def test_a_gpu_that_another_program_uses_is_not_bad_because_it_is_slow():
    def report(speed, *found):
        paths = Paths(names={}, mtu={})
        return doctor.Report(
            findings=found, builds={}, speeds={"GPU matmul": speed}, loaded=False, paths=paths, clock_s=0.0
        )

    used = finding.Finding("GPU processes", "warning", "used by pid 4711")
    for found, status in (((), "bad"), ((used,), "warning")):
        reports = {0: report(700.0), 1: report(705.0), 2: report(330.0, *found)}
        assert statuses(doctor.judge(nodes(3), reports), "GPU matmul") == {2: status}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "ok"),
        ({"share": 0.3, "idle": 1.6}, "bad"),  # cores are idle, and it does not get them
        ({"share": 0.3, "idle": 0.0, "others": 1.9}, "warning"),
        ({"share": 0.3, "idle": 0.0, "others": 1.9, "throttled": 4}, "bad"),
        ({"share": 0.746, "idle": 0.2, "others": 1.1}, "warning"),  # short pauses of a busy machine
        ({"share": 0.9, "throttled": 4}, "ok"),
    ],
)
def test_a_quota_is_bad_and_the_load_of_others_is_not(change, status):
    assert node_checks.check_cpu(replace(GOOD_CPU, **change)).status == status


def test_what_is_said_of_the_cpu_is_what_was_measured():
    found = [
        node_checks.check_cpu(replace(GOOD_CPU, **change)).value
        for change in (
            {},
            {"share": 0.7499, "idle": 0.2, "others": 1.1},
            {"share": 0.3, "throttled": 4},
            {"share": 0.3, "idle": 1.6},
        )
    ]
    assert found == [
        "a thread gets 99 % of a core; others use 0.1 cores",
        "a thread gets 74 % of a core; others use 1.1 cores",  # rounded down: 75 % is expected
        "a thread gets 30 % of a core, limited by a quota",
        "a thread gets 30 % of a core, and meanwhile 1.6 cores are idle",
    ]


@pytest.mark.parametrize(
    ("line", "place"), [("0::/user.slice/a", "user.slice/a"), ("4:cpu,cpuacct:/pod/a", "cpu,cpuacct/pod/a")]
)
def test_throttled_periods_are_read_of_the_group_and_those_above(tmp_path, line, place):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "cpu.stat").write_text("nr_periods 9\nnr_throttled 7\nthrottled_usec 5\n")
    (tmp_path / place).parent.joinpath("cpu.stat").write_text("nr_periods 9\nnr_throttled 30\nthrottled_usec 5\n")
    (tmp_path / "own").write_text(f"7:memory:/x\n{line}\n")
    assert node_checks.throttled_periods(tmp_path / "own", tmp_path) == 37
    assert node_checks.throttled_periods(tmp_path / "absent", tmp_path) == 0


def test_a_library_that_was_replaced_on_the_disk_is_said(tmp_path):
    (tmp_path / "libc10.so").write_bytes(b"1")
    (tmp_path / "maps").write_text(
        f"7f00-7f01 r-xp 00000000 00:01 7   {tmp_path}/libc10.so\n"
        f"7f01-7f02 r-xp 00000000 00:01 8   {tmp_path}/libnccl.so.2 (deleted)\n"
        "7f02-7f03 rw-p 00000000 00:00 0   [heap]\n"
    )
    found = node_checks.mapped_libraries(tmp_path / "maps")
    assert len(found["libc10.so"]) == 64
    assert "replaced" in found["libnccl.so.2"]
    assert node_checks.mapped_libraries()["libc10.so"] == node_checks.mapped_libraries()["libc10.so"]


def test_a_disk_that_takes_no_file_and_one_that_does_not_answer(tmp_path, monkeypatch):
    found = node_checks.check_disk({"DDP_CHECKPOINT_DIR": str(tmp_path / "not/yet")})
    assert found.value.startswith(f"{tmp_path}:")
    assert found.status != "bad"
    never = threading.Event()
    monkeypatch.setattr(node_checks, "DISK_LIMIT_S", 0.01)
    monkeypatch.setattr(node_checks, "_try_disk", lambda *_: never.wait(60))
    assert node_checks.check_disk({}).status == "bad"
    never.set()


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
