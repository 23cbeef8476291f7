"""Ranks near their GPUs: the plan on a machine out of files, and real ranks on real cores."""

import os
import resource

import pytest
from tests.contract.ddprun.test_ranks import check_shares_of_cores
from tests.unit.ddprun import test_affinity
from tests.unit.ddprun.test_affinity import machine

from ddprun.ranks import rank_environment
from ddprun.settings import node_config, options
from ddprun.system import machine as ddprun_machine

plan = test_affinity.plan  # the fixture


def test_real_ranks_may_run_wherever_the_node_may(runs):
    node = runs.start("cores.py", options=("--nproc-per-node", "2"))
    assert node.end() == 0
    assert [node.log(rank) for rank in (0, 1)] == [f"{sorted(os.sched_getaffinity(0))}\n" * 2] * 2


# Two sockets of two NUMA nodes each; a node has 4 physical cores of 2 threads, a cache for each 2 of them.
NUM_NODES, CORES_A_NODE, NUM_CORES = 4, 4, 32


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        (None, []),
        ("node", ["0-3,16-19", "0-3,16-19", "4-7,20-23", "8-11,24-27", "8-11,24-27", "12-15,28-31"]),
        ("exclusive", ["0-1,16-17", "2-3,18-19", "4-7,20-23", "8-9,24-25", "10-11,26-27", "12-15,28-31"]),
    ],
)
def test_ranks_without_gpus_are_dealt_out_when_asked(plan, mode, bound):
    assert plan(mode, 6) == bound


@pytest.mark.parametrize(
    ("mode", "local_world_size", "gpus", "bound"),
    [
        (None, 1, (0, 0, 1), ["0-7,16-23"]),  # the only rank has them all
        (None, 2, (0, 0, 1, 1), []),  # it is not known which of them a rank uses
        ("node", 2, (0, 0, 1, 1), ["0-3,16-19", "4-7,20-23"]),
        ("node", 2, (0, 0, 1), ["0-3,16-19", "0-3,16-19"]),  # no equal shares: as torchrun has it
        ("socket", 2, (0, 1, 2, 3), ["0-7,16-23", "8-15,24-31"]),
        ("exclusive", 2, (0, 1, 0, 1), ["0-3,16-19", "4-7,20-23"]),
        ("exclusive", 2, (0, 1, 1, 1), []),  # their cores overlap
    ],
)
def test_a_rank_with_several_gpus_is_bound_near_all_of_them(plan, mode, local_world_size, gpus, bound):
    assert plan(mode, local_world_size, gpus=gpus) == bound


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_executed_ranks_share_the_cores_out(runs):
    check_shares_of_cores(runs, "--exec")


def test_a_mask_that_somebody_has_set_is_never_left(plan):
    assert plan("node", 2, gpus=(0, 1), allowed=(1, 2, 5, 17)) == ["1-2,17", "5"]
    assert plan("exclusive", 2, gpus=(0, 0), allowed=(1, 2, 17)) == ["1,17", "2"]


def test_threads_are_no_more_than_the_cores_that_a_rank_is_bound_to(tmp_path, monkeypatch):
    gpus = machine(tmp_path, (0,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(NUM_CORES)})
    monkeypatch.setattr(rank_environment, "usable_cores", lambda: NUM_CORES)
    monkeypatch.setattr(ddprun_machine, "pci_addresses", lambda: gpus)

    def shared(*argv, **environ):
        return rank_environment.allocate_resources(
            node_config.read_config(options.parse([*argv, "train.py"]), environ, lambda _: 1), environ, tmp_path
        )

    assert shared().threads == 8
    assert shared(DDP_DEVICE="cpu") == rank_environment.ResourceAllocation(threads=NUM_CORES, bound=())
    assert shared("--numa-binding", "core-complex").threads == 4
    assert shared("--numa-binding", "node", DDP_NODES_HERE="2") == rank_environment.ResourceAllocation(
        threads=NUM_CORES // 2, bound=()
    )


def test_a_gpu_s_address_as_the_kernel_writes_it():
    assert ddprun_machine.pci_address("00000000:3B:00.0") == "0000:3b:00.0"


@pytest.mark.parametrize(
    ("mode", "given"),
    [
        (None, {"local_world_size": 1, "gpus": (0,), "allowed": (0, 1)}),  # one NUMA node: nothing to choose
        ("node", {"local_world_size": 1, "gpus": (-1,)}),  # the firmware does not say
    ],
)
def test_ranks_are_left_alone_where_there_is_no_sound_place(plan, mode, given):
    test_affinity.test_ranks_are_left_alone_where_there_is_no_sound_place(plan, mode, given)


@pytest.mark.parametrize(
    ("limits", "num_gpus", "local_world_size", "device", "facts"),
    [
        ({resource.RLIMIT_MEMLOCK: 65536}, 0, 1, "", ()),
        ({"infiniband": True, "error": "no uverbs0"}, 0, 1, "", ()),
    ],
)
def test_each_warning_about_the_machine_is_a_line(limits, num_gpus, local_world_size, device, facts, monkeypatch):
    test_affinity.test_each_warning_about_the_machine_is_a_line(
        limits, num_gpus, local_world_size, device, facts, monkeypatch
    )
