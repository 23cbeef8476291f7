"""Ranks near their GPUs: the plan on a machine out of files, and real ranks on real cores."""

import json
import os
from itertools import chain

import pytest

from ddpwire.machine import format_ranges


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("how", [(), ("--exec",)], ids=["fork", "exec"])
def test_real_ranks_share_the_cores_out(runs, how):
    node = runs.start("cores.py", options=("--nproc-per-node", "2", "--numa-binding", "exclusive", *how))
    assert node.end() == 0
    cores = [json.loads(line) for rank in (0, 1) for line in node.log(rank).splitlines()]
    assert cores[::2] == cores[1::2]  # the thread has the mask of its rank
    assert sorted(chain(*cores[::2])) == sorted(os.sched_getaffinity(0))
    lines = "\n".join(node.messages())
    for rank, own in enumerate(cores[::2]):
        assert f"rank {rank} on cores {format_ranges(own)}" in lines
