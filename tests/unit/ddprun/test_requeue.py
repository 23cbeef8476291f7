"""What a node tells of its restarts, and of an earlier start of the same run: events, and the time that was lost."""

import errno
import json
import os
from dataclasses import replace

from ddprun.requeue import Requeues, newest_checkpoint
from ddpwire.events import read_events
from ddpwire.run_files import Outcome, read_outcome

STOPPED = Outcome(code=143, cause="stopped", message="stopped by SIGTERM", node=0, rank=1, retry=True)

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
        {
            "targets": [node.state().metrics.split("/")[2]],
            "labels": {"job_id": "a/b", "launcher": "hand", "node": "0"},
        }
    ]
    node.process.terminate()
    assert node.end() == 143
    assert list(folder.iterdir()) == []
    kept = (node.folder / "metrics.prom").read_text()
    assert 'ddp_termination_signals_total{signal="SIGTERM"} 1.0\n' in kept
    assert 'ddp_job_state{state="stopped"} 1.0\n' in kept
    assert 'ddp_rank_exits_total{cause="stopped"} 1.0\n' in kept, "it exited with 143 because of the stop: no error"


def start(tmp_path, *, is_first=False):
    return Requeues(tmp_path, tmp_path / "checkpoints", is_first=is_first)


def test_three_starts_without_a_new_checkpoint_end_a_requeued_job(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for first in (True, False):  # the first start of another job in the same folder counts from 1 again
        outcomes = [start(tmp_path, is_first=number == 1).limit(STOPPED) for number in (1, 2, 3)]
        assert [(one.code, one.cause, one.retry) for one in outcomes] == [
            (143, "stopped", True), (143, "stopped", True), (75, "gave_up", False)
        ], first  # fmt: skip
    assert outcomes[2].message.endswith(STOPPED.message)
    last = start(tmp_path)
    (tmp_path / "checkpoints/.step-7.pt.new").touch()  # not whole yet
    assert last.limit(STOPPED).code == 75
    (tmp_path / "checkpoints/step-7.pt").touch()
    assert last.limit(STOPPED) == STOPPED
    assert newest_checkpoint(tmp_path / "checkpoints").endswith(" step-7.pt")
    again = start(tmp_path)
    os.utime(tmp_path / "checkpoints/step-7.pt", (1, 1))  # written again
    assert again.limit(STOPPED) == STOPPED


def test_what_no_requeue_would_help_stays_as_it_is(tmp_path):
    requeues = [start(tmp_path) for _ in range(5)][-1]
    error = replace(STOPPED, code=3, cause="error", retry=False)
    assert requeues.limit(error) == error
    assert start(tmp_path / "nowhere").limit(STOPPED) == STOPPED  # nothing can be counted there


def test_a_folder_that_cannot_be_listed_is_no_reason_to_give_up(tmp_path, monkeypatch):
    starts = [start(tmp_path) for _ in range(3)]

    def fails(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("ddprun.requeue.newest_checkpoint", fails)
    assert starts[-1].limit(STOPPED) == STOPPED
    assert start(tmp_path).limit(STOPPED) == STOPPED


def test_both_nodes_give_up_after_three_starts_of_a_slurm_job(runs, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    codes = []
    for number in range(3):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        nodes = runs.pair("act.py", "1=-9", options=("--max-restarts", "0", "--run-id", "night"))
        codes.append([node.end() for node in nodes])
    assert codes == [[137, 137], [137, 137], [75, 75]]
    outcomes = [read_outcome((node.folder / "outcome.json").read_text()) for node in nodes]
    assert [(one.cause, one.retry) for one in outcomes] == [("gave_up", False)] * 2
