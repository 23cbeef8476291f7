"""Which of many failures was first, whether a run may start again, and the sentence at the end of one that failed."""

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from ddprun.files import node_dir
from ddprun.files.node_dir import Requeues, newest_checkpoint
from ddprun.health.heartbeat_monitor import RankStatus, find_hung_rank
from ddprun.main import exit_message
from ddprun.ranks.termination import OomMonitor
from ddprun.system.file_writer import FileWriter
from ddprun.system.restart_policy import (
    Decision,
    FailedAttempt,
    Failure,
    decide,
    find_root_failure,
    may_restart,
    outcome_of,
    pod_exit_code,
)
from ddpwire.run_files import Outcome

KILLED = Failure(node=0, rank=1, status=-9)
TRACEBACK = Failure(node=1, rank=2, status=1)
ABORTED = Failure(node=1, rank=3, status=-6)
LEFT_ALONE = Failure(node=0, rank=0, status=142)  # what ddptrain says of a lost peer
OWN_CODE = Failure(node=0, rank=0, status=3)
ALIVE = {0: 0.1, 1: 0.2}


@pytest.mark.parametrize(
    ("failures", "silent_s", "settled", "chosen"),
    [
        ([], ALIVE, False, None),
        ([KILLED, TRACEBACK], ALIVE, False, KILLED),
        ([TRACEBACK, ABORTED, KILLED], ALIVE, False, KILLED),
        ([TRACEBACK, ABORTED], ALIVE, False, None),
        ([LEFT_ALONE, KILLED], ALIVE, True, KILLED),
        ([TRACEBACK], {0: 0.1, 1: 3.5}, False, Failure(node=1, rank=None, status=-9)),
        ([], {0: 0.1, 1: 4.5}, False, Failure(node=1, rank=None, status=-9)),
        ([OWN_CODE], ALIVE, False, None),
        ([TRACEBACK, OWN_CODE], ALIVE, True, OWN_CODE),
    ],
)
def test_the_root_failure_of_several(failures, silent_s, settled, chosen):
    assert find_root_failure(failures, silent_s=silent_s, settled=settled) == chosen


def failure(status, *, node=0, rank=0, **facts):
    return Failure(node=node, rank=rank, status=status, **facts)


TERM, INT = {"stopped_by": signal.SIGTERM}, {"stopped_by": signal.SIGINT}
LAUNCHER_ENDED = "the ddpctl process that started the run has ended"


@pytest.mark.parametrize(
    ("failed", "code", "cause", "retry", "named"),
    [
        (TRACEBACK, 1, "error", False, "rank 2 on node 1"),
        (failure(137, rank=None, setup="node_setup failed: 'a' exited with 9"), 137, "setup", False, "exited with 9"),
        (failure(1, error="ValueError: bad 17"), 1, "error", False, "ValueError: bad 17"),
        (failure(143, **TERM, error="ddptrain: lost the other ranks"), 143, "stopped", True, "SIGTERM"),
        (failure(143, rank=2, stopped_for=2), 143, "stopped", True, "rank 2"),
        (failure(140, **TERM), 140, "stopped", True, "SIGUSR2"),
        (failure(138, **TERM, stop_reason="of a deadline"), 138, "stopped", True, "SIGUSR1"),
        (failure(138, rank=1), 138, "stopped", True, "SIGUSR1"),
        (failure(140, rank=1), 140, "stopped", True, "SIGUSR2"),
        (KILLED, 137, "killed", True, "SIGKILL"),
        (failure(137, error="ddptrain: a worker process ended"), 137, "killed", True, "a worker process ended"),
        (ABORTED, 134, "killed", True, "SIGABRT"),
        (failure(-15, **TERM), 143, "stopped", True, "SIGTERM"),
        (failure(130, **INT), 130, "stopped", False, "SIGINT"),
        *((failure(status, **INT), 130, "stopped", False, "SIGINT") for status in (0, 1, 3, -2)),
        (failure(-9, **INT, killed_here=True, stopped_again=True), 137, "stopped", True, "SIGINT"),
        (failure(-9, **INT, killed_here=True), 130, "stopped", False, "SIGINT"),  # after its grace
        (failure(3, **TERM, error="OSError: disk full"), 3, "stopped", False, "OSError: disk full"),
        (failure(3, stopped_by=signal.SIGUSR1), 3, "error", False, "rank 0 on node 0"),
        (failure(-9, **TERM, killed_here=True), 143, "stopped", True, "rank 0 on node 0"),
        (failure(0, **TERM), 143, "stopped", True, "SIGTERM"),
        (failure(143, **TERM, stop_reason=LAUNCHER_ENDED), 143, "stopped", True, LAUNCHER_ENDED),
        (failure(-15, rank=None, **TERM, unstarted=True), 143, "stopped", True, "SIGTERM"),
        (failure(-11), 139, "killed", False, "SIGSEGV"),
        (failure(-9, rank=1, oom="the limit of its cgroup is 2 GiB"), 137, "oom", True, "2 GiB"),
        (failure(-9, rank=1, hung="no heartbeat"), 144, "hang", True, "no heartbeat"),
        (failure(1, refused="its ranks start ranks"), 1, "error", False, "its ranks start ranks"),
        (failure(-9, rank=None), 137, "node_lost", True, "node 0"),
        (failure(-9, node=2, rank=None), 137, "node_lost", True, "node 2"),
    ],
)
def test_a_failure_becomes_an_outcome(failed, code, cause, retry, named):
    outcome = outcome_of(replace(failed, step=7), attempt=2)
    expected = Outcome(
        code=code, cause=cause, message="", node=failed.node, rank=failed.rank, step=7, retry=retry, attempt=2
    )
    assert replace(outcome, message="") == expected
    assert named in outcome.message


def test_ranks_that_had_exited_with_0_are_named_if_they_may_be_the_cause():
    hung = Failure(node=0, rank=0, status=-9, hung="no heartbeat for 300 s")
    for failed, exited, named in (
        (TRACEBACK, [1], "rank 1"),
        (ABORTED, [5, 0, 4, 7], "0, 4, 5 and 7"),
        (hung, [1], "rank 1"),
    ):
        outcome = outcome_of(failed, attempt=1, exited=exited)
        assert replace(outcome, message="") == replace(outcome_of(failed, attempt=1), message="")
        assert named in outcome.message
    for failed in (KILLED, OWN_CODE, replace(TRACEBACK, stopped_by=signal.SIGTERM)):
        assert outcome_of(failed, attempt=1, exited=[1]) == outcome_of(failed, attempt=1)


def test_a_rank_that_stopped_with_another_is_not_named():
    outcome = outcome_of(Failure(node=0, rank=0, status=138, stopped_for=3), attempt=1)
    assert (outcome.node, outcome.rank) == (None, 3)
    assert "rank 3" in outcome.message
    assert "SIGUSR1" in outcome.message


@pytest.mark.parametrize(
    ("code", "cause", "again", "after_leaving"),
    [
        (1, "error", False, False),
        (78, "error", False, False),
        (143, "stopped", False, True),  # a new node takes the place of the one that was stopped
        (139, "killed", False, False),
        (134, "killed", True, True),
        (137, "oom", True, True),
        (144, "hang", True, True),
    ],
)
def test_a_cause_decides_whether_a_run_may_restart(code, cause, again, after_leaving):
    outcome = Outcome(code=code, cause=cause, message="")
    assert may_restart(outcome) is again
    for errors in (False, True):
        decided = decide(attempts(1, outcome=outcome), max_restarts=1, restarts_errors=errors, leaves=True)
        assert decided.restart is (after_leaving or (errors and code in (1, 139)))


@pytest.mark.parametrize(
    ("code", "cause", "retry", "expected"),
    [
        (0, "success", False, 0),
        (3, "error", False, 3),
        (139, "killed", False, 75),
        (200, "error", True, 75),  # the script's own code
        (137, "killed", True, 75),  # ddprun may not restart the ranks any more
        (144, "hang", True, 75),
        (143, "stopped", True, 143),
        (142, "absent", True, 142),
    ],
)
def test_a_pod_ends_with_128_or_more_only_if_a_new_pod_may_help(code, cause, retry, expected):
    assert pod_exit_code(Outcome(code=code, cause=cause, message="", retry=retry)) == expected


RAISED = Outcome(code=1, cause="error", message="rank 3 on node 1 exited with 1: ValueError: bad", node=1, rank=3)
STOPPED = Outcome(code=143, cause="stopped", message="rank 3 received SIGTERM, and all ranks stopped", rank=3)
LOST = Outcome(code=137, cause="node_lost", message="node 1 was lost: its ddprun stopped responding", node=1)
HEAD_LOST = Outcome(code=137, cause="node_lost", message="node 0 was lost: its store no longer answers", node=0)
ABSENT = Outcome(code=142, cause="absent", message="node 2 of 3 did not join within 1 s")


@pytest.mark.parametrize(
    ("outcome", "silent"),
    [
        pytest.param(RAISED, (0, 2), id="raised"),
        pytest.param(STOPPED, (1, 2), id="stopped"),
        pytest.param(LOST, (2,), id="node-1-lost"),
        pytest.param(HEAD_LOST, (), id="node-0-lost"),
        pytest.param(ABSENT, (), id="absent"),
    ],
)
def test_each_nodes_last_line(outcome: Outcome, silent: tuple[int, ...]) -> None:
    """``silent``: the nodes that name another one, and log nothing where all nodes are on one machine."""
    for node in range(3):
        folder = Path("RUN") / f"node-{node}"
        line = exit_message(outcome, node=node, folder=folder, on_one_machine=False)
        assert (outcome.message in line) == (node not in silent or outcome.cause == "stopped")
        log = folder / "rank-3.log" if (outcome.node, outcome.rank) == (node, 3) else folder
        assert line.endswith(f"{log})")
        assert str(outcome.code) in line
        assert outcome.node is None or f"node {outcome.node}" in line
        alone = "" if node in silent else line
        assert exit_message(outcome, node=node, folder=folder, on_one_machine=True) == alone
        for here in (True, False):
            assert outcome.message in exit_message(outcome, node=node, folder=folder, on_one_machine=here, by_hand=True)


KILL = Outcome(code=137, cause="killed", message="rank 1 on node 0 was killed by SIGKILL", node=0, rank=1, retry=True)
OOM = replace(KILL, cause="oom", message="rank 1 on node 0 was killed for memory")
ERROR = Outcome(code=3, cause="error", message="rank 1 on node 0 exited with 3", node=0, rank=1)


def attempts(*steps, outcome=KILL, lived_s=5.0):
    numbered = enumerate(steps, 1)
    return [FailedAttempt(outcome=replace(outcome, attempt=n), step=step, lived_s=lived_s) for n, step in numbered]


@pytest.mark.parametrize(
    ("ended", "restart"),
    [
        (attempts(None), True),
        (attempts(None, None, None), False),
        (attempts(7, 7, 5), True),
        (attempts(7, 7, 5, 8, 8, 8, 8), False),
        (attempts(None, None, None, lived_s=61.0), True),
        (attempts(1, outcome=OOM), True),
        (attempts(1, 2, outcome=OOM), False),
    ],
)
def test_a_run_restarts_while_it_makes_progress(ended, restart):
    assert decide(ended, max_restarts=1000).restart is restart


@pytest.mark.parametrize(
    ("outcome", "restart"),
    [
        (ERROR, True),
        (KILL, True),
        (replace(ERROR, code=139, cause="killed"), True),  # a crash
        *((replace(ERROR, code=code), False) for code in (65, 66, 78)),
        (replace(ERROR, code=143, cause="stopped"), False),
    ],
)
def test_a_number_of_restarts_as_torchruns_counts_alone(outcome, restart):
    def decided(*steps):
        return decide(attempts(*steps, outcome=outcome), max_restarts=4, restarts_errors=True)

    assert decided(7, 7, 7, 7) == Decision(outcome=replace(outcome, attempt=4), restart=restart)
    assert decided(7, 7, 7, 7, 7) == Decision(outcome=replace(outcome, attempt=5))


def test_restarts_are_limited_where_one_says_so():
    assert [decide(attempts(*range(n)), max_restarts=2).restart for n in (1, 2, 3)] == [True, True, False]
    assert decide(attempts(None), max_restarts=0) == Decision(outcome=replace(KILL, attempt=1))


def test_giving_up_names_the_failure_of_each_attempt():
    decision = decide(attempts(7, 7, 5, 7), max_restarts=1000)
    expected = Outcome(code=75, cause="gave_up", message="", node=0, rank=1, retry=False, attempt=4)
    assert replace(decision, outcome=replace(decision.outcome, message="")) == Decision(outcome=expected)
    assert re.findall(r"attempt (\d)", decision.outcome.message) == ["2", "3", "4"]


def sign(rank, step, silent_s=20.0, *, stopped=False, busy=False):
    return RankStatus(rank=rank, node=0, step=step, silent_s=silent_s, stopped=stopped, busy=busy)


@pytest.mark.parametrize(
    ("signs", "who"),
    [
        ([], None),
        ([sign(0, 5), sign(1, 5, 9.0)], None),  # one still beats
        ([sign(0, 5), sign(1, 4), sign(2, 5)], 1),
        ([sign(0, 5), sign(1, 5, stopped=True)], 1),
        ([sign(0, 5, 0.1), sign(1, 5, 3.0, stopped=True)], None),
        ([sign(0, 5, busy=True), sign(1, 5), sign(2, 5, busy=True)], 1),
        ([sign(0, 5), sign(1, 5), sign(2, None)], 0),
    ],
)
def test_the_rank_that_hangs_is_told_by_its_step_and_cpu_time(signs, who):
    hung_rank = find_hung_rank(signs, 10.0)
    assert (hung_rank.rank if hung_rank else None) == who
    assert find_hung_rank(signs, 0.0) is None


@pytest.mark.parametrize(
    ("line", "folder", "counter", "limit"),
    [
        pytest.param("4:memory:/job\n0::/", "memory/job", "memory.oom_control", "memory.limit_in_bytes", id="v1"),
        pytest.param("0::/job", "job", "memory.events", "memory.max", id="v2"),
    ],
)
def test_a_kill_for_memory_is_seen_once(tmp_path, line, folder, counter, limit):
    own, place = tmp_path / "own", tmp_path / folder
    own.write_text(line)
    place.mkdir(parents=True)
    (place / counter).write_text("low 0\noom_kill 3\n")
    (place / limit).write_text("2147483648\n")
    memory = OomMonitor(root=tmp_path, own=own)
    assert not memory.killed()
    (place / counter).write_text("low 0\noom_kill 4\n")
    assert [memory.killed(), memory.killed()] == [True, False]
    assert "2 GiB" in memory.limit()


SAVED = Outcome(code=143, cause="stopped", message="stopped by SIGTERM", node=0, rank=1, retry=True)


def requeues_of(tmp_path, *, is_first=False):
    return Requeues(tmp_path, tmp_path / "checkpoints", is_first=is_first, files=FileWriter())


def limited(requeues, outcome):
    assert requeues.is_ready()
    return requeues.limit(outcome)


def test_three_starts_without_a_new_checkpoint_end_a_requeued_job(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for first in (True, False):  # the first start of another job in the same folder counts from 1 again
        outcomes = [limited(requeues_of(tmp_path, is_first=number == 1), SAVED) for number in (1, 2, 3)]
        assert [(outcome.code, outcome.cause, outcome.retry) for outcome in outcomes] == [
            (143, "stopped", True), (143, "stopped", True), (75, "gave_up", False)
        ], first  # fmt: skip
    assert outcomes[2].message.endswith(SAVED.message)
    last = requeues_of(tmp_path)
    (tmp_path / "checkpoints/.step-7.pt.new").touch()  # not whole yet
    assert limited(last, SAVED).code == 75
    (tmp_path / "checkpoints/step-7.pt").touch()
    assert limited(last, SAVED) == SAVED
    assert newest_checkpoint(tmp_path / "checkpoints").endswith(" step-7.pt")
    again = requeues_of(tmp_path)
    os.utime(tmp_path / "checkpoints/step-7.pt", (1, 1))  # written again
    assert limited(again, SAVED) == SAVED


def test_what_no_requeue_would_help_stays_as_it_is(tmp_path):
    requeues = [requeues_of(tmp_path) for _ in range(5)][-1]
    error = replace(SAVED, code=3, cause="error", retry=False)
    assert limited(requeues, error) == error
    assert limited(requeues_of(tmp_path / "nowhere"), SAVED) == SAVED  # nothing can be counted there


def test_a_disk_that_does_not_answer_holds_up_no_decision(tmp_path, monkeypatch):
    [requeues_of(tmp_path) for _ in range(2)]
    writer = FileWriter(fork=True)
    last = Requeues(tmp_path, tmp_path / "checkpoints", is_first=False, files=writer)
    writer.start()
    os.kill(writer.pid, signal.SIGSTOP)
    try:
        assert not last.is_ready(), "unknown for now"
        monkeypatch.setattr(node_dir, "ANSWER_S", 0.0)
        assert limited(last, SAVED) == SAVED
    finally:
        os.kill(writer.pid, signal.SIGKILL)
