"""Two ddpruns after a fault: which ones start their ranks again, how soon, and when they give up."""

import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from tests.contract.ddprun.test_restarts import DONE, steps_of

from ddpwire.run_files import Outcome


@pytest.mark.parametrize(("deed", "code"), [pytest.param(-11, 139, id="sigsegv"), pytest.param(255, 255, id="255")])
def test_what_the_script_did_itself_is_reported_once(runs, deed, code):
    first, second = runs.pair("steps.py", "--fail", f"*.1={deed}@3")
    assert (first.end(), second.end()) == (code, code)
    assert first.outcome() == second.outcome()
    outcome = first.outcome()
    assert (outcome.node, outcome.rank, outcome.step, outcome.attempt) == (1, 1, 2, 1)
    assert steps_of(second, 1) == ["step 0"]


def test_with_progress_it_does_not(runs):
    fails = [f"--fail={attempt}.0=-9@{6 + 5 * attempt}" for attempt in range(1, 6)]
    node = runs.start("steps.py", "--steps=40", *fails)
    assert node.end() == 0
    assert node.outcome().attempt == 6


def test_a_node_that_does_not_come_back_is_named(runs):
    options = ("--join-timeout", "6")
    first, second = runs.pair("steps.py", "--steps", "10000", options=options)
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    second.process.kill()
    assert first.end() == 137
    assert (first.outcome().cause, first.outcome().node) == ("node_lost", 1)
    assert "6 s" in first.outcome().message


@pytest.mark.parametrize("starved", [0, 1])
def test_an_agent_that_is_starved_for_two_seconds_is_not_lost(runs, starved):
    nodes = runs.pair("steps.py", "--steps", "60", "--pause", "0.05")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    nodes[starved].process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    nodes[starved].process.send_signal(signal.SIGCONT)
    assert [node.end() for node in nodes] == [0, 0]
    assert nodes[0].outcome().attempt == 1


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
    assert (outcome.cause, outcome.node, outcome.rank) == ("oom", 0, 0)
    assert (outcome.retry, outcome.attempt, outcome.step) == (False, 2, 1)
    assert "0.586 GiB" in outcome.message


def test_the_series_of_a_restart(runs):
    node = runs.start("steps.py", "--steps", "10000", "--fail", "1.0=-9@7", options=("--nproc-per-node", "2"))
    runs.until(lambda: (runs.run_dir / "steps" / "2.12.1").exists())
    runs.until(lambda: any(event.event == "recovered" for event in node.events()))
    with urllib.request.urlopen(node.state().metrics, timeout=60) as answer:  # noqa: S310
        text = answer.read().decode()
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ddp_"))
    assert series['ddp_restarts_total{reason="killed"}'] == "1.0"
    assert series['ddp_restarts_total{reason="hang"}'] == "0.0"
    assert series['ddp_rank_exits_total{cause="sigkill"}'] == "1.0"
    assert series['ddp_rank_exits_total{cause="stopped"}'] == "1.0"
    phases = {p: float(series[f'ddp_recovery_seconds{{phase="{p}"}}']) for p in ("detect", "teardown", "total")}
    assert 0 < phases["detect"] + phases["teardown"] < phases["total"]
    node.process.terminate()
    assert node.end() == 143


def test_what_a_flight_recorder_dumps_of_a_hang_is_kept_for_each_attempt(runs):
    """As NCCL's watchdog does it: rank R writes to the path that ends with R. gloo has none."""
    options = ("--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.0=dump@7", "--fail", "2.0=dump@12", options=options)
    assert node.end() == 0
    kept = {path.name: path.read_text() for path in node.folder.glob("flight-recorder-*")}
    assert kept == {f"flight-recorder-attempt-{attempt}-rank-0": f"attempt {attempt}" for attempt in (1, 2)}


def test_a_rank_that_hangs_is_left_behind_by_the_next_attempt(runs):
    options = ("--nproc-per-node", "2", "--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.1=sleep@7", options=options)
    assert node.end() == 0
    assert node.facts() == DONE
    (failed,) = [event for event in node.events() if event.event == "failed"]
    assert (failed.facts["cause"], failed.node, failed.rank in (0, 1), failed.step) == ("hang", 0, True, 6)
    assert any("RUN/node-0/stacks-attempt-1.txt" in line for line in node.messages())


def test_a_node_0_that_falls_silent_is_named(runs):
    """No connection is closed when a machine loses its power: every call to its store just waits."""
    first, second = runs.pair("steps.py", "--steps", "100000")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    first.process.send_signal(signal.SIGSTOP)
    assert second.end() == 137
    assert second.facts() == Outcome(code=137, cause="node_lost", message="", node=0, retry=True)
    first.process.kill()
