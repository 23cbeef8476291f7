"""What of a machine may hurt a training is a line each."""

from dataclasses import replace

import pytest

from ddprun.system import machine as ddprun_machine
from ddpwire.machine import GIB, MIB

GOOD = ddprun_machine.MachineHealth(shm_bytes=8 * GIB, memlock_bytes=None, open_files=None, num_gpus=0)


@pytest.mark.parametrize(
    ("changes", "local_world_size", "device", "facts"),
    [
        ({}, 8, "", ()),
        ({"shm_bytes": 64 * MIB}, 1, "", ("64 MiB",)),
        ({"shm_bytes": GIB}, 8, "", ("2048 MiB",)),
        ({"open_files": 256}, 1, "", ("1024",)),
        ({"memlock_bytes": 65536}, 1, "", ()),
        ({"memlock_bytes": 65536, "num_gpus": 1}, 1, "cuda", ()),
        ({"memlock_bytes": 65536, "num_gpus": 1, "has_infiniband": True}, 1, "cuda", ("64 KiB",)),
        ({"num_gpus": 1, "has_infiniband": True, "infiniband_error": "no uverbs0"}, 1, "cuda", ("no uverbs0",)),
        ({"has_infiniband": True, "infiniband_error": "no uverbs0"}, 1, "", ()),
        ({"num_gpus": 1}, 2, "cuda", ("1 GPU",)),
        ({"num_gpus": 2, "gpu_problems": ("GPU 1 is lost", "GPU 2")}, 2, "cuda", ("GPU 1", "GPU 2")),
    ],
)
def test_each_warning_about_the_machine_is_a_line(changes, local_world_size, device, facts):
    health = replace(GOOD, **changes)
    lines = list(ddprun_machine.health_warnings(health, local_world_size=local_world_size, num_nodes=2, device=device))
    assert [fact in line for fact, line in zip(facts, lines, strict=True)] == [True] * len(facts)
