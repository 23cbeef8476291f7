"""Two ddpruns after a fault: which ones start their ranks again, how soon, and when they give up."""

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from ddprun import lock
from ddpwire.outcome import Outcome

pytestmark = pytest.mark.slow

DONE = Outcome(code=0, cause="ok", message="every rank exited with 0", attempt=2)
KILLED = "was killed by SIGKILL"


def steps_of(node, rank):
    """What a rank said of its starts."""
    return [line.rpartition(" from ")[2] for line in node.log(rank).splitlines() if line[:7] == "attempt"]


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_killed_rank_costs_one_restart_of_all(runs, rank):
    first, second = runs.pair("steps.py", "--fail", f"1.{rank}=-9@7", nproc=2)
    assert (first.end(), second.end()) == (0, 0)
    assert (first.outcome(), second.outcome()) == (DONE, DONE)
    assert [steps_of(node, r) for node, r in ((first, 0), (first, 1), (second, 2), (second, 3))] == [
        ["step 0", "step 5"]
    ] * 4
    assert first.said()[:3] == [
        "[node0] ranks 0 to 1 of 4 started (attempt 1)",
        f"[node0] attempt 1 failed: rank {rank} on node {rank // 2} {KILLED}; starting all ranks anew",
        "[node0] ranks 0 to 1 of 4 started (attempt 2)",
    ]


@pytest.mark.parametrize(("deed", "code", "how"), [(-11, 139, "was killed by SIGSEGV"), (255, 255, "exited with 255")])
def test_what_the_script_did_itself_is_reported_once(runs, deed, code, how):
    first, second = runs.pair("steps.py", "--fail", f"*.1={deed}@3")
    assert (first.end(), second.end()) == (code, code)
    assert first.outcome() == second.outcome()
    assert first.outcome().message == f"rank 1 on node 1 {how}"
    assert (first.outcome().step, first.outcome().attempt) == (2, 1)
    assert steps_of(second, 1) == ["step 0"]


def test_without_progress_it_gives_up_on_both_nodes(runs):
    first, second = runs.pair("steps.py", "--fail", "1.0=-9@3", "--fail", "[23].1=-9@1", "--fail", "4.0=-9@3")
    assert (first.end(), second.end()) == (75, 75)
    what = (f"attempt 2: rank 1 on node 1 {KILLED}", f"attempt 3: rank 1 on node 1 {KILLED}")
    message = f"gave up after 3 attempts without progress: {'; '.join(what)}; attempt 4: rank 0 on node 0 {KILLED}"
    expected = Outcome(code=75, cause="gave_up", message=message, node=0, rank=0, step=2, retry=False, attempt=4)
    assert (first.outcome(), second.outcome()) == (expected, expected)


def test_with_progress_it_does_not(runs):
    fails = [f"--fail={attempt}.0=-9@{6 + 5 * attempt}" for attempt in range(1, 6)]
    node = runs.start("steps.py", "--steps=40", *fails)
    assert node.end() == 0
    assert node.outcome().attempt == 6


def test_a_stopped_rank_is_named_and_killed(runs):
    options = ("--hang-timeout", "1", "--max-restarts", "0")
    first, second = runs.pair("steps.py", "--steps", "10000", nproc=2, options=options)
    runs.until(lambda: len(list((runs.run_dir / "steps").glob("1.*.3"))) > 5)
    os.kill(second.state().ranks[1].pid, signal.SIGSTOP)
    stopped_at = time.monotonic()
    assert (first.end(), second.end()) == (144, 144)
    assert time.monotonic() - stopped_at < 1 + 15
    outcome = first.outcome()
    assert second.outcome() == outcome
    assert (outcome.cause, outcome.node, outcome.rank, outcome.retry) == ("hang", 1, 3, True)
    assert outcome.message.endswith(f"(--hang-timeout 1) after step {outcome.step}, and it is stopped (SIGSTOP)")
    for node, ranks in ((first, (0, 1)), (second, (2, 3))):
        kept = (node.folder / "stacks-attempt-1.txt").read_text()
        assert [line.split()[2] for line in kept.splitlines() if line.startswith("====")] == [str(r) for r in ranks]
        assert kept.count('steps.py", line') == 2  # the frozen one speaks too


def test_a_rank_that_hangs_is_left_behind_by_the_next_attempt(runs):
    options = ("--nproc-per-node", "2", "--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.1=sleep@7", options=options)
    assert node.end() == 0
    assert node.outcome() == DONE
    started, failed, kept, again, *_ = node.said()
    assert re.fullmatch(
        r"\[node0\] attempt 1 failed: rank [01] on node 0 hung: no sign of life for [12] s \(--hang-timeout 1\) "
        r"after step 6, and it takes no CPU time; starting all ranks anew",
        failed,
    )
    assert kept == "[node0] the stacks of this node's ranks are in RUN/node-0/stacks-attempt-1.txt"
    assert [started, again] == [f"[node0] ranks 0 to 1 of 2 started (attempt {attempt})" for attempt in (1, 2)]


def test_a_node_that_was_killed_and_is_started_again_finds_its_way_in(runs):
    port, args = runs.free_port(), ("steps.py", "--steps", "200", "--pause", "0.01")
    first = runs.start(*args, nodes="2", port=port)
    second = runs.start(*args, node=1, nodes="2", port=port)
    runs.until(lambda: (runs.run_dir / "steps" / "1.20.1").exists())
    second.process.kill()
    second.end()
    runs.until(lambda: not lock.is_held(second.folder), 5)
    second = runs.start(*args, node=1, nodes="2", port=port)  # as its launcher does
    assert (first.end(), second.end()) == (0, 0)
    assert (first.outcome(), second.outcome()) == (DONE, DONE)
    assert "[node0] attempt 1 failed: node 1 was lost: its ddprun fell silent; starting all ranks anew" in first.said()


def test_a_node_that_does_not_come_back_is_named(runs):
    options = ("--join-timeout", "6")
    first, second = runs.pair("steps.py", "--steps", "10000", options=options)
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    second.process.kill()
    assert first.end() == 137
    assert first.outcome().message == "node 1 was lost: its ddprun fell silent, and did not come back in 6 s"


def test_a_job_that_may_shrink_goes_on_without_a_lost_node(runs):
    port, args = runs.free_port(), ("steps.py", "--steps", "200", "--pause", "0.01")
    first = runs.start(*args, nodes="1:2", port=port)
    second = runs.start(*args, node=1, nodes="1:2", port=port)
    runs.until(lambda: (runs.run_dir / "steps" / "1.20.1").exists())
    second.process.kill()
    killed_at = time.monotonic()
    runs.until(lambda: first.log(0).count("attempt 2: rank 0 of 1") == 1, 15)
    assert time.monotonic() - killed_at < 10
    assert first.end() == 0


@pytest.mark.parametrize("starved", [0, 1])
def test_an_agent_that_is_starved_for_two_seconds_is_not_lost(runs, starved):
    nodes = runs.pair("steps.py", "--steps", "60", "--pause", "0.05")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    nodes[starved].process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    nodes[starved].process.send_signal(signal.SIGCONT)
    assert [node.end() for node in nodes] == [0, 0]
    assert nodes[0].outcome().attempt == 1


def test_a_node_0_that_is_gone_without_a_word_is_named(runs):
    """No connection is closed when a machine loses its power: every call to its store just waits."""
    first, second = runs.pair("steps.py", "--steps", "100000")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    first.process.send_signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    assert second.end() == 137
    assert time.monotonic() - stopped_at < 8
    assert second.outcome() == Outcome(
        code=137,
        cause="node_lost",
        message="node 0 was lost, and with it the store of the run: start the run again",
        node=0,
        retry=True,
    )
    first.process.kill()


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def memory_group(tmp_path):
    """A memory cgroup (v1) of 600 MB."""
    group = GROUPS / f"ddprun-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(600 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield group
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            group.rmdir()
            break
        except OSError:
            time.sleep(0.05)


def test_a_rank_that_is_killed_for_memory_is_started_again_once(runs, memory_group):
    def enter():
        (memory_group / "cgroup.procs").write_text(str(os.getpid()))

    node = runs.start("steps.py", "--fail", "*.0=eat@2", preexec_fn=enter)
    assert node.end() == 137
    outcome = node.outcome()
    assert outcome.message == (
        "rank 0 on node 0 was killed for memory: its cgroup has 0.586 GiB; "
        "give the job more, or each rank less to do (again)"
    )
    assert (outcome.cause, outcome.retry, outcome.attempt, outcome.step) == ("oom", False, 2, 1)


def test_the_series_of_a_restart(runs):
    node = runs.start("steps.py", "--steps", "10000", "--fail", "1.0=-9@7", options=("--nproc-per-node", "2"))
    runs.until(lambda: (runs.run_dir / "steps" / "2.12.1").exists())
    runs.until(lambda: any("training again" in line for line in node.said()))
    with urllib.request.urlopen(node.state().metrics, timeout=5) as answer:  # noqa: S310
        text = answer.read().decode()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ddp_"))
    assert series['ddp_restarts_total{reason="killed"}'] == "1.0"
    assert series['ddp_restarts_total{reason="hang"}'] == "0.0"
    assert series['ddp_rank_exits_total{cause="sigkill"}'] == "1.0"
    assert series['ddp_rank_exits_total{cause="stopped"}'] == "1.0"
    phases = {p: float(series[f'ddp_recovery_seconds{{phase="{p}"}}']) for p in ("detect", "teardown", "total")}
    assert 0 < phases["detect"] + phases["teardown"] < phases["total"] < 10
    node.process.terminate()
    assert node.end() == 143


def test_what_a_flight_recorder_dumps_of_a_hang_is_kept_for_each_attempt(runs):
    """As NCCL's watchdog does it: rank R writes to the path that ends with R. gloo has none."""
    options = ("--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.0=dump@7", "--fail", "2.0=dump@12", options=options)
    assert node.end() == 0
    kept = {path.name: path.read_text() for path in node.folder.glob("flight-recorder-*")}
    assert kept == {f"flight-recorder-attempt-{attempt}-rank-0": f"attempt {attempt}" for attempt in (1, 2)}
