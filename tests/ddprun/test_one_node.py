"""One ddprun and its ranks: nothing outlives it, and signals reach who they are meant for."""

import os
import random
import signal
import time

import psutil
import pytest

from ddpwire.outcome import Outcome


@pytest.mark.parametrize("victim", ["ddprun", "keeper", "rank"])
def test_whoever_is_killed_nothing_is_left(runs, victim):
    node = runs.start("act.py", "all=family", options=("--nproc-per-node", "2", "--max-restarts", "0"))
    runs.wait_until_ready(node)
    runs.until(lambda: len(runs.alive()) == 2 + 2 * 4)
    keeper = psutil.Process(node.process.pid).children()[0]
    pids = {"ddprun": node.process.pid, "keeper": keeper.pid, "rank": node.state().ranks[0].pid}
    killed_at = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    if victim == "ddprun":
        assert runs.nothing_is_left()
        return
    assert node.end() == 137
    assert runs.nothing_is_left()
    assert time.monotonic() - killed_at < 4
    expected = Outcome(
        code=137, cause="killed", message="rank 0 on node 0 was killed by SIGKILL", node=0, rank=0, retry=True
    )
    if victim == "keeper":  # both ranks fell at once
        assert node.outcome().code == expected.code
        assert node.said()[1] == "[node0] the keeper of the ranks was killed, and they with it"
    else:
        assert node.outcome() == expected


@pytest.mark.parametrize("moment", ["at once", "a while", "ready"])
def test_sigterm_at_any_moment(runs, moment):
    node = runs.start("act.py", "all=save", options=("--nproc-per-node", "2"))
    if moment == "ready":
        runs.wait_until_ready(node)
    else:
        runs.until((node.folder / "node.json").exists)
        time.sleep(0 if moment == "at once" else random.uniform(0.1, 3.0))
    node.process.terminate()
    asked_at = time.monotonic()
    assert node.end() == 143
    assert time.monotonic() - asked_at < 5
    assert runs.nothing_is_left()
    if moment == "ready":
        assert node.outcome().cause == "stopped"
        assert node.log(0) == "ready\nsaved on SIGTERM\n"


def test_usr1_reaches_the_ranks_and_never_kills_ddprun(runs):
    node = runs.start("act.py", "all=save")
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGUSR1)
    assert node.end() == 138
    assert node.outcome() == Outcome(
        code=138,
        cause="stopped",
        message="stopped by SIGUSR1: rank 0 on node 0 exited with 138",
        node=0,
        rank=0,
        retry=True,
    )


def test_a_deaf_rank_is_killed_when_its_grace_is_over(runs):
    node = runs.start("act.py", "all=deaf", options=("--grace", "0.5"))
    runs.wait_until_ready(node)
    node.process.terminate()
    assert node.end() == 143
    assert node.outcome().message == "stopped by SIGTERM: rank 0 on node 0 did not end in time and was killed"


def test_a_second_signal_kills_at_once(runs):
    node = runs.start("act.py", "all=deaf", options=("--grace", "60"))
    runs.wait_until_ready(node)
    node.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    node.process.send_signal(signal.SIGINT)
    assert node.end(10) == 143


def test_the_end_of_the_lifeline_is_a_stop(runs):
    read, write = os.pipe()
    node = runs.start("act.py", "all=save", env={"DDP_LIFELINE_FD": str(read)}, pass_fds=(read,))
    os.close(read)
    runs.wait_until_ready(node)
    os.close(write)
    assert node.end() == 143
    assert node.log(0) == "ready\nsaved on SIGTERM\n"


def test_a_killed_keeper_is_replaced_when_there_are_restarts(runs):
    node = runs.start("act.py", "0=family", "again=0", options=("--max-restarts", "1"))
    runs.until(lambda: len(runs.alive()) == 2 + 4)
    psutil.Process(node.process.pid).children()[0].kill()
    assert node.end() == 0
    assert node.said() == [
        "[node0] rank 0 of 1 started (attempt 1)",
        "[node0] the keeper of the ranks was killed, and they with it",
        "[node0] attempt 1 failed: rank 0 on node 0 was killed by SIGKILL; starting all ranks anew",
        "[node0] ranks are executed, which takes longer than a fork: the process that had torch was killed",
        "[node0] rank 0 of 1 started (attempt 2)",
    ]
