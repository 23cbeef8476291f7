"""What Slurm and the nodes' files say of a run, as a state of ours."""

from pathlib import Path

import pytest
from tests.unit.ddpctl.answers import only, perform
from tests.unit.ddpctl.test_slurm_target import RUN

from ddpctl.command import Output
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.queue import read_answers
from ddpctl.targets.slurm.target import SlurmTarget

DATA = Path(__file__).parents[2] / "data" / "slurm"


def status(text: str, *, run: Run = RUN, now: float = 5000.0) -> RunStatus:
    asked, (state,) = perform(
        SlurmTarget(SlurmOptions()).status((run,), now=now), {"": Output(returncode=0, stdout=text)}
    )
    assert only(asked).argv[:5] == ("sh", "-c", queue.ASK, "ddpctl", run.handle["job"])
    return state


def answered(squeue: str, *files: tuple[str, str]) -> str:
    return f"==> squeue <==\n{squeue}\n" + "".join(f"==> /r/night/{path} <==\n{text}\n\n" for path, text in files)


NO_CONTROLLER = "Unable to contact slurm controller"
NODE = '{"run": "night", "node": 0, "pid": 3, "state": "training", "started": 1.0, "metrics": "http://n0:1/metrics"}'
SAVED = '{"code": 143, "cause": "stopped", "message": "stopped by SIGTERM", "retry": true, "step": 40}'
BOTH_RUN = (("node-0/node.json", NODE), ("node-1/node.json", NODE))
BOTH_SAVED = (("node-0/outcome.json", SAVED), ("node-1/outcome.json", SAVED))


@pytest.mark.parametrize(
    ("text", "state", "code", "fact"),
    [
        (answered("7|N/A|PENDING|Resources|2026-11-20T14:00:00|"), "pending", None, "2026-11-20T14:00:00"),
        (answered("7|N/A|PENDING|PartitionNodeLimit|N/A|"), "pending", None, "partition"),
        (answered("7|N/A|PENDING|ReqNodeNotAvail, UnavailableNodes:node-2|N/A|"), "pending", None, "node-2"),
        (answered("7|N/A|PENDING|BeginTime|N/A|", ("node-0/outcome.json", SAVED)), "pending", None, "BeginTime"),
        (answered("7|N/A|RUNNING|None|2026-11-20T13:00:00|n[0-1]"), "starting", None, "2 of 2"),
        (answered("7|N/A|RUNNING|None|x|n[0-1]", *BOTH_RUN), "running", None, "2 of 2"),
        (answered("7|N/A|COMPLETING|None|x|n[0-1]", *BOTH_SAVED), "stopping", None, "COMPLETING"),
        (answered("7|N/A|FAILED|NonZeroExitCode|x|n[0-1]", *BOTH_SAVED[:1]), "stopped", 143, "stopped by SIGTERM"),
        (answered("7|N/A|NODE_FAIL|None|x|n[0-1]", *BOTH_RUN[:1]), "failed", 137, "job.log"),
        (answered("7|N/A|CANCELLED|None|x|"), "stopped", 143, "CANCELLED"),
        (answered("7|N/A|NEW_STATE|None|x|"), "unknown", None, "NEW_STATE"),
        (answered("", *BOTH_SAVED[1:]), "stopped", 143, "stopped by SIGTERM"),
        (answered(""), "lost", 137, "job.log"),
        (answered(f"error: slurm_load_jobs error: {NO_CONTROLLER}"), "unknown", None, NO_CONTROLLER),
    ],
    ids=["Resources", "PartitionNodeLimit", "ReqNodeNotAvail", "requeued", "starting", "training", "COMPLETING",
         "FAILED", "NODE_FAIL", "CANCELLED", "NEW_STATE", "outcome-alone", "nothing", "no-controller"],
)  # fmt: skip
def test_the_state_of_a_job_follows_from_squeue_and_its_nodes_files(
    text: str, state: str, code: int | None, fact: str
) -> None:
    job = status(text)
    assert (job.state, job.code, fact in job.message) == (state, code, True)


def test_a_job_that_never_started_has_no_log() -> None:
    cancelled = "7|N/A|CANCELLED|None|x|"
    assert not status(answered(cancelled)).has_logs
    assert status(answered(cancelled, ("starts", "slurm 7 0 20 900\n"))).has_logs


def test_answers_of_slurm_22_05_are_read() -> None:
    """From the lab's Slurm 22.05: an array at work, a job that waits for it, and one that was never there."""
    answers = read_answers((DATA / "ask-22.05.txt").read_text())
    assert [(job.id, job.task, job.state, job.reason) for job in answers.jobs] == [
        ("1", "2", "succeeded", "None"),
        ("1", "4", "pending", "JobArrayTaskLimit"),
        ("1", "3", "running", "None"),
        ("4", None, "pending", "Resources"),
    ]
    assert [Path(path).name for path in answers.files] == ["node.json", "outcome.json"]
