"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

import json

from ddpwire.events import read_events

SAY = """
import os, sys
print("past", os.environ.get("DDP_STEPS_BEFORE"), os.environ["DDP_LOST_BEFORE"], flush=True)
"""


def kinds(node):
    return [event.event for event in read_events((node.folder / "events.jsonl").read_text())]


def test_a_restart_and_a_requeue_are_told_and_what_they_cost(runs, tmp_path):
    options = ("--run-id", "night-1")
    first = runs.start("steps.py", "--pause=0.4", "--fail", "1.0=-9@7", "--fail", "2.0=3@12", options=options)
    assert first.end() == 3
    events = read_events((first.folder / "events.jsonl").read_text())
    assert [event.event for event in events] == [
        "node_started",
        "preflight_done",
        "rendezvous_done",
        "ranks_started",
        "first_step",
        "rank_exited",
        "failed",
        "restart",
        "rendezvous_done",
        "ranks_started",
        "first_step",
        "recovered",
        "rank_exited",
        "failed",
        "node_ended",
    ]
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
    said = {cause: float(seconds) for cause, _, seconds in (pair.partition("=") for pair in lost.split(","))}
    assert list(said) == ["requeue", "rendezvous", "at"]
    assert said["requeue"] > 0
    assert said["rendezvous"] > 0
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


def test_a_node_says_where_its_metrics_are_for_as_long_as_it_lives(runs, tmp_path):
    folder = tmp_path / "targets"
    env = {"DDP_TARGETS_DIR": str(folder), "DDP_LAUNCHER": "hand"}
    node = runs.start("act.py", "all=save", options=("--run-id", "a/b"), env=env)
    runs.wait_until_ready(node)
    (path,) = folder.iterdir()
    assert (path.name, path.stat().st_mode & 0o777) == ("a_b.node-0.json", 0o644)
    assert json.loads(path.read_text()) == [
        {"targets": [node.state().metrics.split("/")[2]], "labels": {"job_id": "a/b", "launcher": "hand", "node": "0"}}
    ]
    node.process.terminate()
    assert node.end() == 143
    assert list(folder.iterdir()) == []
    kept = (node.folder / "metrics.prom").read_text()
    assert 'ddp_termination_signals_total{signal="SIGTERM"} 1.0\n' in kept
    assert 'ddp_job_state{state="stopped"} 1.0\n' in kept
    assert 'ddp_rank_exits_total{cause="stopped"} 1.0\n' in kept, "it exited with 143 because of the stop: no error"
