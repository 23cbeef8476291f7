"""Two ddpruns after a fault: which ones start their ranks again, how soon, and when they give up."""

import json
import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from ddprun import process_discovery
from ddpwire.run_files import Outcome

pytestmark = pytest.mark.e2e

DONE = Outcome(code=0, cause="ok", message="", attempt=2)


def steps_of(node, rank):
    """What a rank said of its starts."""
    return [line.rpartition(" from ")[2] for line in node.log(rank).splitlines() if line[:7] == "attempt"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_costs_one_restart_of_all(runs, wording, rank):
    first, second = runs.pair("steps.py", "--tell", "--fail", f"1.{rank}=-9@7", local_world_size=2)
    assert (first.end(), second.end()) == (0, 0)
    assert (first.facts(), second.outcome()) == (DONE, first.outcome())
    assert [steps_of(node, r) for node, r in ((first, 0), (first, 1), (second, 2), (second, 3))] == [
        ["step 0", "step 5"]
    ] * 4
    (failed,) = [event for event in first.events() if event.event == "failed"]
    assert (failed.node, failed.rank, failed.facts["cause"]) == (rank // 2, rank, "killed")
    assert first.state().last_failure == second.state().last_failure == failed.facts["message"]
    wording(first.outcome().message)
    wording("\n".join(first.said()[:3]))


@pytest.mark.parametrize(
    ("deed", "code"),
    [
        pytest.param(-11, 139, id="sigsegv"),
        pytest.param(255, 255, id="255"),
    ],
)
def test_what_the_script_did_itself_is_reported_once(runs, wording, deed, code):
    first, second = runs.pair("steps.py", "--fail", f"*.1={deed}@3")
    assert (first.end(), second.end()) == (code, code)
    assert first.outcome() == second.outcome()
    outcome = first.outcome()
    assert (outcome.node, outcome.rank, outcome.step, outcome.attempt) == (1, 1, 2, 1)
    wording(outcome.message)
    assert steps_of(second, 1) == ["step 0"]


def test_without_progress_it_gives_up_on_both_nodes(runs, wording):
    first, second = runs.pair("steps.py", "--fail", "1.0=-9@3", "--fail", "[23].1=-9@1", "--fail", "4.0=-9@3")
    assert (first.end(), second.end()) == (75, 75)
    expected = Outcome(code=75, cause="gave_up", message="", node=0, rank=0, step=2, retry=False, attempt=4)
    assert (first.facts(), second.outcome()) == (expected, first.outcome())
    wording(first.outcome().message)


def test_with_progress_it_does_not(runs):
    fails = [f"--fail={attempt}.0=-9@{6 + 5 * attempt}" for attempt in range(1, 6)]
    node = runs.start("steps.py", "--steps=40", *fails)
    assert node.end() == 0
    assert node.outcome().attempt == 6


def test_a_stopped_rank_is_named_and_killed(runs, wording):
    options = ("--hang-timeout", "1", "--max-restarts", "0")
    first, second = runs.pair("steps.py", "--steps", "10000", local_world_size=2, options=options)
    runs.until(lambda: len(list((runs.run_dir / "steps").glob("1.*.3"))) > 5)
    os.kill(second.rank_pid(1), signal.SIGSTOP)
    assert (first.end(), second.end()) == (144, 144)
    outcome = first.outcome()
    assert second.outcome() == outcome
    assert (outcome.cause, outcome.node, outcome.rank, outcome.retry) == ("hang", 1, 3, True)
    wording(re.sub(r"for \d+ s", "for N s", outcome.message).replace(f"step {outcome.step},", "step N,"))
    for node, ranks in ((first, (0, 1)), (second, (2, 3))):
        kept = (node.folder / "stacks-attempt-1.txt").read_text()
        _, *sections = re.split(r"^==== ", kept, flags=re.MULTILINE)
        assert [section.split()[1] for section in sections] == [str(rank) for rank in ranks]
        assert all('steps.py", line' in section for section in sections)  # the frozen one speaks too
        answer = json.loads((node.folder / "diagnosis-attempt-1.json").read_text())
        assert [one["rank"] for one in answer["ranks"]] == [*ranks]
        states = {one["rank"]: one["samples"][-1] for one in answer["ranks"]}
        assert {number: state["state"] == "T" for number, state in states.items()} == {one: one == 3 for one in ranks}
        assert all((state["threads"] is None) == (number == 3) for number, state in states.items())


def test_a_rank_that_hangs_is_left_behind_by_the_next_attempt(runs, wording):
    options = ("--nproc-per-node", "2", "--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.1=sleep@7", options=options)
    assert node.end() == 0
    assert node.facts() == DONE
    (failed,) = [event for event in node.events() if event.event == "failed"]
    assert (failed.facts["cause"], failed.node, failed.rank in (0, 1), failed.step) == ("hang", 0, True, 6)
    lines = "\n".join(node.said()[:4])
    wording(re.sub(r"rank [01] on node 0 (.*) for [12] s", r"rank R on node 0 \1 for N s", lines))


def test_a_node_that_was_killed_and_is_started_again_joins_the_next_attempt(runs, wording):
    port, args = runs.free_port(), ("steps.py", "--steps", "200", "--pause", "0.01")
    first = runs.start(*args, nodes="2", port=port)
    second = runs.start(*args, node=1, nodes="2", port=port)
    runs.until(lambda: (runs.run_dir / "steps" / "1.20.1").exists())
    second.process.kill()
    second.end()
    runs.until(lambda: not process_discovery.is_locked(second.folder))
    second = runs.start(*args, node=1, nodes="2", port=port)  # as its launcher does
    assert (first.end(), second.end()) == (0, 0)
    assert (first.facts(), second.outcome()) == (DONE, first.outcome())
    (failed,) = [event for event in first.events() if event.event == "failed"]
    assert (failed.facts["cause"], failed.node, failed.rank) == ("node_lost", 1, None)
    wording("\n".join(line for line in first.said() if "attempt 1 failed" in line))


def test_a_node_that_does_not_come_back_is_named(runs, wording):
    options = ("--join-timeout", "6")
    first, second = runs.pair("steps.py", "--steps", "10000", options=options)
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    second.process.kill()
    assert first.end() == 137
    assert (first.outcome().cause, first.outcome().node) == ("node_lost", 1)
    wording(first.outcome().message)


def test_a_job_that_may_shrink_goes_on_without_a_lost_node(runs):
    port, args = runs.free_port(), ("steps.py", "--steps", "200", "--pause", "0.01")
    first = runs.start(*args, nodes="1:2", port=port)
    second = runs.start(*args, node=1, nodes="1:2", port=port)
    runs.until(lambda: (runs.run_dir / "steps" / "1.20.1").exists())
    second.process.kill()
    runs.until(lambda: first.log(0).count("attempt 2: rank 0 of 1") == 1)
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


def test_a_node_0_that_falls_silent_is_named(runs, wording):
    """No connection is closed when a machine loses its power: every call to its store just waits."""
    first, second = runs.pair("steps.py", "--steps", "100000")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    first.process.send_signal(signal.SIGSTOP)
    assert second.end() == 137
    assert second.facts() == Outcome(code=137, cause="node_lost", message="", node=0, retry=True)
    wording(second.outcome().message)
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


def test_a_rank_that_is_killed_for_memory_is_started_again_once(runs, wording, memory_group):
    def enter():
        (memory_group / "cgroup.procs").write_text(str(os.getpid()))

    node = runs.start("steps.py", "--fail", "*.0=eat@2", preexec_fn=enter)
    assert node.end() == 137
    outcome = node.outcome()
    assert (outcome.cause, outcome.node, outcome.rank) == ("oom", 0, 0)
    assert (outcome.retry, outcome.attempt, outcome.step) == (False, 2, 1)
    wording(outcome.message)


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
