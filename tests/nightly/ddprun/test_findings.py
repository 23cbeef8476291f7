"""What is made of the nodes' findings: who is to blame, what is the same, who is slow, when a core is held back."""

import errno
import os
import threading
import types
from dataclasses import replace

import pytest
from tests.unit.ddpcheck import test_findings
from tests.unit.ddpcheck.test_findings import GOOD_CPU, nodes, paths, statuses

from ddpcheck import finding, network_checks, node_checks
from ddpcheck.network_checks import Paths


def test_what_is_said_of_the_cpu_is_what_was_measured():
    values = [
        node_checks.check_cpu(replace(GOOD_CPU, **change)).value
        for change in (
            {},
            {"share": 0.7499, "idle": 0.2, "others": 1.1},
            {"share": 0.3, "throttled": 0.4},
            {"share": 0.3, "idle": 1.6},
        )
    ]
    assert values == [
        "a thread gets 99 % of a core; others use 0.1 cores",
        "a thread gets 74 % of a core; others use 1.1 cores",  # rounded down: 75 % is expected
        "a thread gets 30 % of a core, limited by a quota",
        "a thread gets 30 % of a core, and meanwhile 1.6 cores are idle",
    ]


@pytest.mark.parametrize(
    ("line", "place", "unit"),
    [
        ("0::/user.slice/a", "user.slice/a", "usec {}000000"),
        ("4:cpu,cpuacct:/pod/a", "cpu,cpuacct/pod/a", "time {}000000000"),
    ],
)
def test_the_throttled_time_is_read_of_the_group_and_those_above(tmp_path, line, place, unit):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "cpu.stat").write_text(f"nr_throttled 50\nthrottled_{unit.format(7)}\n")
    (tmp_path / place).parent.joinpath("cpu.stat").write_text(f"nr_throttled 9\nthrottled_{unit.format(30)}\n")
    (tmp_path / "own").write_text(f"7:memory:/x\n{line}\n")
    assert node_checks.throttled_s(own=tmp_path / "own", root=tmp_path) == 37
    assert node_checks.throttled_s(own=tmp_path / "absent", root=tmp_path) == 0


def test_a_library_that_was_replaced_on_the_disk_is_said(tmp_path):
    (tmp_path / "libc10.so").write_bytes(b"1")
    (tmp_path / "maps").write_text(
        f"7f00-7f01 r-xp 00000000 00:01 7   {tmp_path}/libc10.so\n"
        f"7f01-7f02 r-xp 00000000 00:01 8   {tmp_path}/libnccl.so.2 (deleted)\n"
        "7f02-7f03 rw-p 00000000 00:00 0   [heap]\n"
    )
    libraries = node_checks.mapped_libraries(tmp_path / "maps")
    assert len(libraries["libc10.so"]) == 64
    assert "replaced" in libraries["libnccl.so.2"]
    assert node_checks.mapped_libraries()["libc10.so"] == node_checks.mapped_libraries()["libc10.so"]


def test_little_lockable_memory_is_a_warning_only_with_infiniband(tmp_path, monkeypatch):
    monkeypatch.setattr(node_checks.machine, "resource_limit", lambda _: 8 << 20)
    monkeypatch.setattr(node_checks.machine, "INFINIBAND", tmp_path / "infiniband")
    assert statuses(node_checks.check_limits(num_gpus=1, num_nodes=2), "memlock") == {}
    (tmp_path / "infiniband/mlx5_0").mkdir(parents=True)
    assert statuses(node_checks.check_limits(num_gpus=1, num_nodes=2), "memlock") == {0: "warning"}


def test_a_file_system_that_reports_no_blocks_is_not_full(tmp_path, monkeypatch):
    blocks = types.SimpleNamespace(f_blocks=0, f_bavail=0, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: blocks)
    monkeypatch.setattr(node_checks, "SLOW_DISK", 0)
    disk = node_checks.check_disk({"DDP_RUN_DIR": str(tmp_path)})
    shm = next(node_checks.check_limits(num_gpus=0, num_nodes=1))
    assert (disk.status, "free space unknown" in disk.value) == ("ok", True)
    assert (shm.status, shm.value) == ("ok", "no limit")


def test_the_reason_why_a_name_is_unknown_is_kept(monkeypatch):
    def resolve(*_, **__):
        raise TimeoutError(errno.ETIMEDOUT, "the name server does not answer")

    monkeypatch.setattr(network_checks, "resolve", resolve)
    me = nodes(1)[0]
    assert network_checks.try_paths(me, [me]) == Paths(names={0: ""}, nameless={0: "the name server does not answer"})


def test_a_disk_that_takes_no_file_and_one_that_does_not_answer(tmp_path, monkeypatch):
    disk = node_checks.check_disk({"DDP_CHECKPOINT_DIR": str(tmp_path / "not/yet")})
    assert disk.value.startswith(f"{tmp_path}:")
    assert disk.status != "bad"
    never = threading.Event()
    monkeypatch.setattr(node_checks, "DISK_LIMIT_S", 0.01)
    monkeypatch.setattr(node_checks, "_try_disk", lambda *_: never.wait(60))
    assert node_checks.check_disk({}).status == "bad"
    never.set()


@pytest.mark.parametrize("builds", ["ab", "aabb", "abc", "aabc"])
def test_without_a_majority_no_build_is_bad(builds):
    findings = [*finding.compare_builds("libraries", {node: {"torch": build} for node, build in enumerate(builds)})]
    assert statuses(findings, "libraries") == dict.fromkeys(range(len(builds)), "warning")
    others = " or ".join(dict.fromkeys(build for build in builds if build != "a"))
    assert findings[0].value == f"torch a, elsewhere {others} (it is not known which nodes are right)"


def test_a_slow_node_is_given_its_share_of_the_median_rounded_down():
    findings = [*finding.compare_speed("CPU matmul", {0: 100, 1: 100, 2: 79.9}, "GFLOP/s")]
    assert [result.value for result in findings] == [
        "100 GFLOP/s",
        "100 GFLOP/s",
        "79.9 GFLOP/s, 79 % of the others' median",
    ]


@pytest.mark.parametrize(
    ("failed", "count", "blamed"),
    [
        ([(3, 0), (3, 1), (3, 2)], 4, {3}),
        ([(0, 2), (1, 2), (3, 2), (0, 3), (1, 3), (2, 3)], 4, {2, 3}),
        ([(0, 1)], 2, {1}),
    ],
)
def test_the_fewest_nodes_that_explain_all_pairs_are_blamed(failed, count, blamed):
    test_findings.test_the_fewest_nodes_that_explain_all_pairs_are_blamed(failed, count, blamed)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"share": 0.3, "idle": 0.0, "others": 1.9, "throttled": 0.1}, "warning"),
        ({"share": 0.9, "throttled": 0.4}, "ok"),
    ],
)
def test_a_quota_is_bad_and_the_load_of_others_is_not(change, status):
    test_findings.test_a_quota_is_bad_and_the_load_of_others_is_not(change, status)


@pytest.mark.parametrize(
    ("speeds", "loaded", "slow"),
    [
        ({0: 100, 1: 99, 2: 101, 3: 75}, (), {3: "warning"}),
        ({0: 100}, (), {}),
    ],
)
def test_a_node_is_slow_by_the_median_of_the_others(speeds, loaded, slow):
    test_findings.test_a_node_is_slow_by_the_median_of_the_others(speeds, loaded, slow)


def test_rare_faults_of_a_network_are_put_down_to_their_nodes():
    announced = paths(2, n0={"mtu": {1: 1400}, "announced": {1: True}})
    assert statuses(network_checks.judge(nodes(2), announced), "path MTU") == {1: "warning"}
    silent = paths(3, n2={"mtu": {}})
    assert statuses(network_checks.judge(nodes(3), silent), "path MTU") == {2: "not looked at"}
    same = [replace(node, host="ubuntu") for node in nodes(2)]  # two clones of one virtual machine
    own = paths(2, **{f"n{n}": {"names": dict.fromkeys(range(2), "127.0.1.1")} for n in range(2)})
    assert statuses(network_checks.judge(same, own), "names") == {0: "warning", 1: "warning"}
    silent = paths(2, n0={"names": {0: "10.0.0.0", 1: ""}, "nameless": {1: "the name server does not answer"}})
    findings = [result for result in network_checks.judge(nodes(2), silent) if result.check == "names"]
    assert (findings[0].status, findings[0].value) == (
        "warning",
        "it cannot resolve the name of node 1 (the name server does not answer)",
    )
    unknown = {n: Paths(names=dict.fromkeys(range(3), "")) for n in range(3)}
    assert statuses(network_checks.judge(nodes(3), unknown), "names") == {}
