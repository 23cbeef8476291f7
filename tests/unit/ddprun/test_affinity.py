"""Ranks near their GPUs: the plan on a machine out of files; and what of a machine may hurt a training."""

import os
import resource
from dataclasses import replace

import pytest

from ddprun.ranks import rank_environment
from ddprun.settings import node_config, options
from ddprun.system import machine as ddprun_machine
from ddpwire.machine import GIB, MIB, format_ranges

# Two sockets of two NUMA nodes each; a node has 4 physical cores of 2 threads, a cache for each 2 of them.
NUM_NODES, CORES_A_NODE, NUM_CORES = 4, 4, 32


def cores_of(node):
    first = range(node * CORES_A_NODE, (node + 1) * CORES_A_NODE)
    return {*first, *(core + NUM_CORES // 2 for core in first)}


def machine(folder, gpus):
    """A sysfs with GPUs on the NUMA nodes ``gpus``; their addresses."""

    def write(path, text):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{text}\n")

    for node in range(NUM_NODES):
        write(f"devices/system/node/node{node}/cpulist", format_ranges(cores_of(node)))
        for core in cores_of(node):
            physical = core % (NUM_CORES // 2)
            siblings = {physical, physical + NUM_CORES // 2}
            cache = {
                sibling
                for mate in (physical // 2 * 2, physical // 2 * 2 + 1)
                for sibling in (mate, mate + NUM_CORES // 2)
            }
            of_core = f"devices/system/cpu/cpu{core}"
            write(f"{of_core}/topology/physical_package_id", node // 2)
            write(f"{of_core}/topology/thread_siblings_list", format_ranges(siblings))
            write(f"{of_core}/cache/index3/shared_cpu_list", format_ranges(cache))
    for index, node in enumerate(gpus):
        write(f"bus/pci/devices/0000:{index:02x}:00.0/numa_node", node)
    return tuple(f"0000:{index:02x}:00.0" for index in range(len(gpus)))


@pytest.fixture
def plan(tmp_path, monkeypatch):
    def plan(mode, local_world_size, gpus=(), environ=None, allowed=range(NUM_CORES)):
        addresses = machine(tmp_path, gpus)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*allowed})
        return [
            format_ranges(cores)
            for cores in ddprun_machine.plan_affinity(
                mode, local_world_size, lambda: addresses, environ or {}, tmp_path
            )
        ]

    return plan


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        ("node", ["8-11,24-27", "0-3,16-19", "8-11,24-27"]),
        (None, ["8-11,24-27", "0-3,16-19", "8-11,24-27"]),
        ("socket", ["8-15,24-31", "0-7,16-23", "8-15,24-31"]),
        ("exclusive", ["8-9,24-25", "0-3,16-19", "10-11,26-27"]),
        ("core-complex", ["8-9,24-25", "0-1,16-17", "10-11,26-27"]),
        ("none", []),
    ],
)
def test_ranks_are_bound_to_cores_near_their_gpus(plan, mode, bound):
    assert plan(mode, 3, gpus=(2, 0, 2)) == bound


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        (None, {"local_world_size": 3, "gpus": (0, 1)}),  # ranks share GPUs
        (None, {"local_world_size": 1, "gpus": (0,), "environ": {"OMP_PLACES": "cores"}}),  # somebody else binds
        ("node", {"local_world_size": 1, "gpus": (0,), "allowed": (4, 8)}),  # none of the cores near the GPU is ours
        ("exclusive", {"local_world_size": 5, "gpus": (0,) * 5}),  # fewer cores than ranks
    ],
)
def test_ranks_are_left_alone_where_there_is_no_sound_place(plan, mode, given):
    assert plan(mode, **given) == []


@pytest.mark.parametrize(
    ("ranges", "cores"), [("0-2,5", {0, 1, 2, 5}), ("7", {7}), ("", set()), ("0,2-3,9-12", {0, 2, 3, *range(9, 13)})]
)
def test_a_list_as_the_kernel_writes_it(ranges, cores):
    assert ddprun_machine.parse_cpu_list(ranges) == cores
    assert format_ranges(cores) == ranges


def test_nodes_that_share_a_machine_share_its_cores(monkeypatch):
    monkeypatch.setattr(rank_environment, "usable_cores", lambda: 8)
    config = node_config.read_config(options.parse(["train.py"]), {"DDP_NODES_HERE": "2"}, lambda _: 1)
    monkeypatch.setattr(rank_environment.machine, "plan_affinity", lambda *_: (frozenset((0, 1)),))
    shared = rank_environment.allocate_resources(config, {})
    assert (shared.threads, shared.bound) == (4, ())
    alone = rank_environment.allocate_resources(replace(config, nodes_here=1), {})
    assert (alone.threads, alone.cores(0)) == (2, frozenset((0, 1)))  # no more than it may use


@pytest.mark.parametrize(
    ("limits", "num_gpus", "local_world_size", "device", "facts"),
    [
        ({}, 0, 8, "", ()),
        ({"shm": 64 * MIB}, 0, 1, "", ("64 MiB",)),
        ({"shm": GIB}, 0, 8, "", ("2048 MiB",)),
        ({resource.RLIMIT_NOFILE: 256}, 0, 1, "", ("1024",)),
        ({resource.RLIMIT_MEMLOCK: 65536}, 1, 1, "cuda", ()),
        ({resource.RLIMIT_MEMLOCK: 65536, "infiniband": True}, 1, 1, "cuda", ("64 KiB",)),
        ({"infiniband": True, "error": "no uverbs0"}, 1, 1, "cuda", ("no uverbs0",)),
        ({}, 1, 2, "cuda", ("1 GPU",)),
        ({"gpus": ("GPU 1 is lost", "GPU 2")}, 2, 2, "cuda", ("GPU 1", "GPU 2")),
    ],
)
def test_each_warning_about_the_machine_is_a_line(limits, num_gpus, local_world_size, device, facts, monkeypatch):
    monkeypatch.setattr(ddprun_machine, "shm_bytes", lambda: limits.get("shm", 8 * GIB))
    monkeypatch.setattr(ddprun_machine, "resource_limit", limits.get)
    monkeypatch.setattr(ddprun_machine, "has_infiniband", lambda: "infiniband" in limits)
    monkeypatch.setattr(ddprun_machine, "infiniband_error", lambda: limits.get("error", ""))
    monkeypatch.setattr(ddprun_machine, "ask_nvml", lambda *_: limits.get("gpus", ()))
    warnings = ddprun_machine.health_warnings(num_gpus, local_world_size=local_world_size, num_nodes=2, device=device)
    lines = [*warnings]
    assert [fact in line for fact, line in zip(facts, lines, strict=True)] == [True] * len(facts)
