"""Any process of a node may be killed or stopped: nothing is left, and a supervisor is replaced."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from ddpwire.run_files import Outcome


@pytest.mark.parametrize("victim", ["ddprun", "supervisor", "rank"])
def test_whichever_process_is_killed_nothing_is_left(runs, victim):
    runs.executed = victim == "ddprun"
    node = runs.start("act.py", "all=family", options=("--nproc-per-node", "2", "--max-restarts", "0"))
    runs.wait_until_ready(node)
    runs.until(lambda: len(runs.alive()) == 3 + 2 * 4)
    supervisor = supervisor_of(node)
    pids = {"ddprun": node.process.pid, "supervisor": supervisor.pid, "rank": node.rank_pid(0)}
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "ddprun":
        assert runs.remaining() == []
        return
    assert node.end() == 137
    assert runs.remaining() == []
    if victim == "supervisor":  # both ranks fell at once
        assert node.outcome().code == 137
        assert "supervisor" in node.messages()[1]
    else:
        assert node.facts() == Outcome(code=137, cause="killed", message="", node=0, rank=0, retry=True)


def test_a_killed_supervisor_is_replaced_when_there_are_restarts(runs):
    node = runs.start("act.py", "0=family", "again=0", options=("--max-restarts", "1"))
    runs.until(lambda: len(runs.alive()) == 3 + 4)
    supervisor_of(node).kill()
    assert node.end() == 0
    assert node.outcome().attempt == 2
    assert any("exec" in line for line in node.messages()), "nothing is left that has imported torch"


def supervisor_of(node):
    """The fork of a node's ddprun that leads a session of its own, as soon as it is there."""
    ddprun = psutil.Process(node.process.pid)
    for child in ddprun.children():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if child.cmdline() == ddprun.cmdline() and os.getsid(child.pid) == child.pid:
                return child
    return None


def test_a_stopped_supervisor_is_named_and_continued_while_ranks_run(runs):
    node = runs.start("act.py", "0=save")
    runs.wait_until_ready(node)
    supervisor = supervisor_of(node)
    supervisor.suspend()
    lines = runs.until(lambda: [line for line in node.messages() if "SIGSTOP" in line])
    assert f"pid {supervisor.pid}" in lines[0]
    node.process.terminate()
    assert node.end() == 143
    assert node.log(0).endswith("saved on SIGTERM\n")


def test_the_kernel_kills_ranks_for_memory_before_their_ddprun(runs):
    node = runs.start("act.py")
    runs.wait_until_ready(node)
    pids = (node.process.pid, node.rank_pid(0))
    own, of_rank = (int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in pids)
    node.process.terminate()
    assert (node.end(), of_rank) == (143, min(1000, own + 500))
