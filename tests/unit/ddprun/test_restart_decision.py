"""Whether a run continues after an attempt that failed, and who holds the others up."""

import re
from dataclasses import replace

import pytest

from ddprun.health.heartbeat_monitor import RankStatus, find_hung_rank
from ddprun.ranks.termination import OomMonitor
from ddprun.system.restart_policy import Decision, FailedAttempt, decide
from ddpwire.run_files import Outcome

KILLED = Outcome(code=137, cause="killed", message="rank 1 on node 0 was killed by SIGKILL", node=0, rank=1, retry=True)
OOM = replace(KILLED, cause="oom", message="rank 1 on node 0 was killed for memory")
ERROR = Outcome(code=3, cause="error", message="rank 1 on node 0 exited with 3", node=0, rank=1)


def attempts(*steps, outcome=KILLED, lived_s=5.0):
    numbered = enumerate(steps, 1)
    return [FailedAttempt(outcome=replace(outcome, attempt=n), step=step, lived_s=lived_s) for n, step in numbered]


@pytest.mark.parametrize(
    ("ended", "restart"),
    [
        (attempts(None), True),
        (attempts(None, None), True),
        (attempts(None, None, None), False),
        (attempts(7, 7, 5), True),
        (attempts(7, 7, 5, 7), False),
        (attempts(7, 7, 5, 8), True),
        (attempts(7, 7, 5, 8, 8, 8), True),
        (attempts(7, 7, 5, 8, 8, 8, 8), False),
        (attempts(*range(50)), True),
        (attempts(None, None, None, lived_s=61.0), True),
        (attempts(1, outcome=ERROR), False),
        (attempts(1, outcome=OOM), True),
        ([*attempts(1, outcome=OOM), *attempts(2)], True),
        (attempts(1, 2, outcome=OOM), False),
    ],
)
def test_a_run_restarts_while_it_makes_progress(ended, restart):
    assert decide(ended, max_restarts=1000).restart is restart


@pytest.mark.parametrize(
    ("outcome", "restart"),
    [
        (ERROR, True),
        (KILLED, True),
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
    assert decide(attempts(None), max_restarts=0) == Decision(outcome=replace(KILLED, attempt=1))


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
        ([sign(0, None), sign(1, None)], None),  # they may be compiling
        ([sign(0, 5), sign(1, 4), sign(2, 5)], 1),
        ([sign(0, 5), sign(1, 5, stopped=True)], 1),
        ([sign(0, 5, 0.1), sign(1, None, stopped=True)], 1),
        ([sign(0, 5, 0.1), sign(1, 5, 3.0, stopped=True)], None),
        ([sign(0, 5, busy=True), sign(1, 5)], 1),
        ([sign(0, 5, busy=True), sign(1, 5), sign(2, 5, busy=True)], 1),
        ([sign(0, 5), sign(1, 5), sign(2, 5, busy=True)], 2),
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
        pytest.param(
            "4:memory:/not/visible/here",
            "memory",
            "memory.oom_control",
            "memory.limit_in_bytes",
            id="v1-of-another-namespace",
        ),
    ],
)
def test_a_kill_for_memory_is_seen_once(tmp_path, line, folder, counter, limit):
    own, place = tmp_path / "own", tmp_path / folder
    own.write_text(line)
    place.mkdir(parents=True)
    (place / counter).write_text("low 0\noom_kill 3\n")
    (place / limit).write_text("2147483648\n")
    memory = OomMonitor(tmp_path, own)
    assert not memory.killed()
    (place / counter).write_text("low 0\noom_kill 4\n")
    assert [memory.killed(), memory.killed()] == [True, False]
    assert "2 GiB" in memory.limit()


def test_a_machine_without_cgroups_reports_no_kill(tmp_path):
    assert not OomMonitor(tmp_path, tmp_path / "own").killed()
    assert "GiB" not in OomMonitor(tmp_path, tmp_path / "own").limit()
