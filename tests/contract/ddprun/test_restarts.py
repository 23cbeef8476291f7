"""After a fault: which ranks are started again, when a run gives up, and what a restart costs."""

import json
import os
import re
import signal

import pytest

from ddprun.files import process_discovery
from ddpwire.events import read_events
from ddpwire.run_files import Outcome

DONE = Outcome(code=0, cause="ok", message="", attempt=2)


def steps_of(node, rank):
    """What a rank said of its starts."""
    return [line.rpartition(" from ")[2] for line in node.log(rank).splitlines() if line[:7] == "attempt"]


def test_a_killed_rank_costs_one_restart_of_all(runs):
    first, second = runs.pair("steps.py", "--tell", "--fail", "1.3=-9@7", local_world_size=2)
    assert (first.end(), second.end()) == (0, 0)
    assert (first.facts(), second.outcome()) == (DONE, first.outcome())
    assert [steps_of(node, r) for node, r in ((first, 0), (first, 1), (second, 2), (second, 3))] == [
        ["step 0", "step 5"]
    ] * 4
    (failed,) = [event for event in first.events() if event.event == "failed"]
    assert (failed.node, failed.rank, failed.facts["cause"]) == (1, 3, "killed")
    assert first.state().last_failure == second.state().last_failure == failed.facts["message"]
    assert "rank 3 on node 1" in first.messages()[1]
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
        assert [entry["rank"] for entry in answer["ranks"]] == [*ranks]
        states = {entry["rank"]: entry["samples"][-1] for entry in answer["ranks"]}
        assert {number: state["state"] == "T" for number, state in states.items()} == {
            rank: rank == 3 for rank in ranks
        }
        assert all((state["threads"] is None) == (number == 3) for number, state in states.items())


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


def resumed_apart(runs, how, *, executed=()):
    """What node 0 reports after a restart of two nodes, which have folders of their own for checkpoints."""
    port = runs.free_port()
    for node in (1, 0):
        env = {"DDP_CHECKPOINT_DIR": str(runs.run_dir.parent / f"checkpoints-{node}")}
        options = ("--nproc-per-node", "2", *(("--exec",) if node in executed else ()))
        last = runs.start("resume.py", how, node=node, nodes="2", port=port, options=options, env=env)
    assert [node.end() for node in runs.nodes] == [0, 0]
    assert last.facts() == DONE
    assert not [event for event in runs.nodes[0].events() if event.event == "resumed_apart"]
    return [event for event in last.events() if event.event == "resumed_apart"]


def test_ranks_that_resume_from_different_checkpoints_are_named(runs):
    (event,) = resumed_apart(runs, "own")
    first = {"ranks": [0, 1], "file": "last", "step": 5}
    second = {"ranks": [2, 3], "file": "", "step": 0}
    assert (event.attempt, event.facts["groups"], event.facts["unknown"]) == (2, [first, second], [])
    assert runs.nodes[1].state().resumed_apart == event.facts["message"]


@pytest.mark.parametrize("how", ["first", "shards", "late"])
def test_ranks_that_resume_from_one_checkpoint_are_not_accused(runs, how):
    assert resumed_apart(runs, how) == []


def test_ranks_that_cannot_be_observed_are_unknown(runs):
    assert resumed_apart(runs, "own", executed=(1,)) == []


SAY = """
import os, sys
print("past", os.environ.get("DDP_STEPS_BEFORE"), os.environ["DDP_LOST_BEFORE"], flush=True)
"""


def kinds(node):
    return [event.event for event in read_events((node.folder / "events.jsonl").read_text())]


def test_a_restart_and_a_requeue_are_events_with_their_cost(runs, tmp_path):
    options = ("--run-id", "night-1")
    first = runs.start("steps.py", "--pause=0.4", "--fail", "1.0=-9@7", "--fail", "2.0=3@12", options=options)
    assert first.end() == 3
    events = read_events((first.folder / "events.jsonl").read_text())
    start = ["rendezvous_done", "ranks_started", "first_step"]
    first_attempt = ["node_started", "preflight_done", *start, "rank_exited", "failed", "restart"]
    second_attempt = [*start, "recovered", "rank_exited", "failed", "node_ended"]
    assert [event.event for event in events] == first_attempt + second_attempt
    assert [event.attempt for event in events] == [1] * 8 + [2] * 7
    exited, failed, restart = events[5:8]
    assert (exited.rank, exited.step, exited.facts) == (0, 6, {"cause": "sigkill", "status": -9})
    assert (failed.rank, failed.step, failed.facts["cause"]) == (0, 6, "killed")
    assert restart.facts == {"reason": "killed"}
    assert (events[11].step, events[11].facts) == (5, {"steps_lost": 2})
    assert (events[-1].facts["code"], events[-1].facts["cause"]) == (3, "error")

    script = tmp_path / "say.py"
    script.write_text(SAY)
    again = runs.start(str(script), options=options)
    assert again.end() == 0
    word, steps, lost = again.log(0).splitlines()[-1].split()
    assert (word, steps) == ("past", "11")
    seconds_lost = {cause: float(seconds) for cause, _, seconds in (pair.partition("=") for pair in lost.split(","))}
    assert list(seconds_lost) == ["requeue", "rendezvous", "at"]
    assert seconds_lost["requeue"] > 0
    assert seconds_lost["rendezvous"] > 0
    started = [
        event for event in read_events((again.folder / "events.jsonl").read_text()) if event.event[:6] == "node_s"
    ]
    assert ["requeued_s" in event.facts for event in started] == [False, True]
    kept = (again.folder / "metrics.prom").read_text()
    counted = ('ddp_restarts_total{reason="killed"} 1.0', 'ddp_restarts_total{reason="requeue"} 1.0',
               'ddp_rank_exits_total{cause="sigkill"} 1.0', 'ddp_rank_exits_total{cause="error"} 1.0',
               'ddp_rank_exits_total{cause="ok"} 1.0', "ddp_steps_lost_total 2.0")  # fmt: skip
    assert [line for line in counted if line not in kept.splitlines()] == []

    other = runs.start(str(script), options=("--run-id", "night-2"))
    assert other.end() == 0
    assert other.log(0).splitlines()[-1].startswith("past None rendezvous=")
    assert kinds(other)[0] == "node_started"
    assert kinds(other).count("node_started") == 1
    assert json.loads((other.folder / "node.json").read_text())["state"] == "succeeded"
