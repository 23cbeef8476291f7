"""Two ddpruns after a fault: which ones start their ranks again, how soon, and when they give up."""

import json
import os
import re
import signal

import pytest

from ddprun import process_discovery
from ddpwire.run_files import Outcome

DONE = Outcome(code=0, cause="ok", message="", attempt=2)


def steps_of(node, rank):
    """What a rank said of its starts."""
    return [line.rpartition(" from ")[2] for line in node.log(rank).splitlines() if line[:7] == "attempt"]


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_costs_one_restart_of_all(runs, rank):
    first, second = runs.pair("steps.py", "--tell", "--fail", f"1.{rank}=-9@7", local_world_size=2)
    assert (first.end(), second.end()) == (0, 0)
    assert (first.facts(), second.outcome()) == (DONE, first.outcome())
    assert [steps_of(node, r) for node, r in ((first, 0), (first, 1), (second, 2), (second, 3))] == [
        ["step 0", "step 5"]
    ] * 4
    (failed,) = [event for event in first.events() if event.event == "failed"]
    assert (failed.node, failed.rank, failed.facts["cause"]) == (rank // 2, rank, "killed")
    assert first.state().last_failure == second.state().last_failure == failed.facts["message"]
    assert f"rank {rank} on node {rank // 2}" in first.messages()[1]
    assert "step 4" in first.messages()[1], "the last checkpoint"


def test_without_progress_it_gives_up_on_both_nodes(runs):
    first, second = runs.pair("steps.py", "--fail", "1.0=-9@3", "--fail", "[23].1=-9@1", "--fail", "4.0=-9@3")
    assert (first.end(), second.end()) == (75, 75)
    expected = Outcome(code=75, cause="gave_up", message="", node=0, rank=0, step=2, retry=False, attempt=4)
    assert (first.facts(), second.outcome()) == (expected, first.outcome())
    assert re.findall(r"attempt (\d)", first.outcome().message) == ["2", "3", "4"]


def test_a_stopped_rank_is_named_and_killed(runs):
    options = ("--hang-timeout", "1", "--max-restarts", "0")
    first, second = runs.pair("steps.py", "--steps", "10000", local_world_size=2, options=options)
    runs.until(lambda: len(list((runs.run_dir / "steps").glob("1.*.3"))) > 5)
    os.kill(second.rank_pid(1), signal.SIGSTOP)
    assert (first.end(), second.end()) == (144, 144)
    outcome = first.outcome()
    assert second.outcome() == outcome
    assert (outcome.cause, outcome.node, outcome.rank, outcome.retry) == ("hang", 1, 3, True)
    assert "--hang-timeout 1" in outcome.message
    assert "SIGSTOP" in outcome.message
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


def test_a_rank_that_hangs_is_left_behind_by_the_next_attempt(runs):
    options = ("--nproc-per-node", "2", "--hang-timeout", "1")
    node = runs.start("steps.py", "--fail", "1.1=sleep@7", options=options)
    assert node.end() == 0
    assert node.facts() == DONE
    (failed,) = [event for event in node.events() if event.event == "failed"]
    assert (failed.facts["cause"], failed.node, failed.rank in (0, 1), failed.step) == ("hang", 0, True, 6)
    assert any("RUN/node-0/stacks-attempt-1.txt" in line for line in node.messages())


def test_a_node_that_was_killed_and_is_started_again_joins_the_next_attempt(runs):
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


def test_a_job_that_may_shrink_goes_on_without_a_lost_node(runs):
    port, args = runs.free_port(), ("steps.py", "--steps", "200", "--pause", "0.01")
    first = runs.start(*args, nodes="1:2", port=port)
    second = runs.start(*args, node=1, nodes="1:2", port=port)
    runs.until(lambda: (runs.run_dir / "steps" / "1.20.1").exists())
    second.process.kill()
    runs.until(lambda: first.log(0).count("attempt 2: rank 0 of 1") == 1)
    assert first.end() == 0


def test_a_node_0_that_falls_silent_is_named(runs):
    """No connection is closed when a machine loses its power: every call to its store just waits."""
    first, second = runs.pair("steps.py", "--steps", "100000")
    runs.until(lambda: (runs.run_dir / "steps" / "1.5.1").exists())
    first.process.send_signal(signal.SIGSTOP)
    assert second.end() == 137
    assert second.facts() == Outcome(code=137, cause="node_lost", message="", node=0, retry=True)
    first.process.kill()
