"""One ddprun and its ranks: nothing outlives it, and signals reach who they are meant for."""

import json
import os
import random
import signal
import time

import pytest
from tests.contract.ddprun.test_node_commands import commands
from tests.contract.ddprun.test_signals import INTERRUPTED

from ddprun.ranks.termination import SAME_REQUEST_S

EXECUTED = ("test_sigterm_at_any_moment", "test_ctrl_c_is_a_keyboard_interrupt_and_130")


def test_the_ranks_that_have_not_ended_after_a_stop_are_recorded(runs):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "3", "--grace", "200"))
    runs.until(lambda: all(node.log(rank).startswith("ready") for rank in range(3)))
    os.kill(node.rank_pid(1), signal.SIGSTOP)
    node.process.terminate()
    runs.until(lambda: [rank.state for rank in node.state().ranks] == ["ended", "stopped", "ended"])
    assert node.state().state == "stopping"
    time.sleep(2 * SAME_REQUEST_S)
    node.process.terminate()
    assert node.end() == 143


ELASTIC = """
import os
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
def work(number):
    dist.init_process_group("gloo")
    place = f"{number + dist.get_rank()} of {dist.get_world_size()}"
    dist.destroy_process_group()
    return place
if __name__ == "__main__":
    assert dist.is_torchelastic_launched()
    name = f"inner-{os.environ['RANK']}"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=name, rdzv_backend="c10d", rdzv_endpoint="localhost:0"
    )
    print(dist.get_node_local_rank(), dict(sorted(elastic_launch(config, work)(7).items())))
"""


def test_a_rank_is_launched_by_torch_elastic_and_may_launch_with_it(runs, tmp_path):
    script = tmp_path / "inner.py"
    script.write_text(ELASTIC)
    node = runs.start(script, options=("--nproc-per-node", "2"))
    assert node.end() == 0
    inner = "{0: '7 of 2', 1: '8 of 2'}"
    assert sorted(node.stdout.read_text().splitlines()) == [f"[node0 rank{rank}] {rank} {inner}" for rank in (0, 1)]


def test_sigterm_at_any_moment(runs):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2"))
    runs.until((node.folder / "node.json").exists)
    time.sleep(random.uniform(0.1, 3.0))
    node.process.terminate()
    assert node.end() == 143
    assert runs.remaining() == []


@pytest.mark.parametrize(
    ("end", "options"),
    [("sys.exit(0)", ()), ("raise", ()), *((end, ("--exec",)) for end in ("sys.exit(0)", "sys.exit(5)", "raise"))],
)
def test_ctrl_c_is_a_keyboard_interrupt_and_130(runs, tmp_path, end, options):
    (tmp_path / "script.py").write_text(INTERRUPTED.format(end=end))
    node = runs.start(str(tmp_path / "script.py"), options=options)
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGINT)
    assert node.end() == 130
    assert node.log(0).splitlines()[:2] == ["ready", "interrupted"]
    assert node.outcome().cause == "stopped"


@pytest.mark.parametrize(("deed", "option", "code"), [("0=3", "--restart-limit", 3)])
def test_max_restarts_is_torchruns(runs, deed, option, code):
    node = runs.start("act.py", deed, "again=0", options=(option, "1"))
    assert node.end() == code
    assert node.outcome().attempt == (1 if code else 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_nproc_per_node_auto_counts_the_cores_of_the_affinity_as_torchrun_does(runs):
    runs.executed, cores = True, os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        node = runs.start("environment.py", "WORLD_SIZE", options=("--nproc-per-node", "auto"))
    finally:
        os.sched_setaffinity(0, cores)
    assert node.end() == 0
    assert json.loads(node.log(0)) == {"WORLD_SIZE": "1"}


def test_torchruns_role_virtual_local_rank_and_run_path(runs, tmp_path):
    script = tmp_path / "show.py"
    script.write_text(
        "import os, sys\n"
        "names = ('RANK', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES', 'ROLE_NAME', 'ROLE_RANK', 'ROLE_WORLD_SIZE')\n"
        "open(os.environ['RANK'], 'w').write(str([__name__, sys.argv[1:], *(os.environ[name] for name in names)]))\n"
    )
    flags = ("--nproc-per-node", "2", "--role", "trainer", "--virtual-local-rank", "--run-path")
    node = runs.start(script, "--lr", "1", options=flags, env={"CUDA_VISIBLE_DEVICES": "5, 7"}, cwd=tmp_path)
    assert node.end() == 0
    shown = [(tmp_path / rank).read_text() for rank in "01"]
    assert shown == [
        str(["__main__", ["--lr", "1"], rank, "0", gpu, "trainer", rank, "2"]) for rank, gpu in (("0", "5"), ("1", "7"))
    ]


def test_output_without_line_breaks_is_cut_into_lines(runs):
    node = runs.start("act.py", "all=0", options=commands("head -c 300000 /dev/zero | tr '\\0' x"))
    assert node.end() == 0
    lines = [line for line in node.stderr.read_text().splitlines() if "node_setup: xxx" in line]
    assert (len(lines), max(map(len, lines)) < 70_000) == (5, True)


def test_a_signal_that_is_delivered_twice_is_one_request(runs):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2", "--grace", "60"))
    runs.until(lambda: all(node.log(rank).startswith("ready") for rank in range(2)))
    for _ in range(2):
        node.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert node.end(55) == 143
    assert not [line for line in node.messages() if "again" in line]
