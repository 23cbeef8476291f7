"""The files from which a Prometheus learns where the runs are."""

import json
from pathlib import Path

from tests.unit.ddpctl.records import run_of

from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.runs.run_status import NodeReport, RunStatus
from ddpwire.run_files import NodeState


def node(number: int, metrics: str | None, *, alive: bool = True) -> NodeReport:
    state = NodeState(run="night", node=number, pid=1, state="training", started=0.0, metrics=metrics)
    return NodeReport(node=number, alive=alive, state=state, outcome=None)


TRAINING = RunStatus(
    run="night",
    state="training",
    message="",
    nodes=(node(0, "http://10.0.0.1:9500/metrics"), node(1, None), node(2, "http://10.0.0.3:9500/m", alive=False)),
)
ENDED = RunStatus(run="night", state="succeeded", message="")
RUN = run_of(kind="ssh", job=JobSpec(nodes="2"), handle={"logs": "x"})


def test_a_run_on_other_machines_is_a_target_while_it_lives(tmp_path: Path) -> None:
    path = tmp_path / ".targets" / "night.json"
    launcher.update_discovery(tmp_path, [(RUN, TRAINING)])
    assert json.loads(path.read_text()) == [
        {"targets": ["10.0.0.1:9500"], "labels": {"job_id": "night", "launcher": "ssh", "node": "0"}}
    ]
    assert path.stat().st_mode & 0o777 == 0o644
    written = path.stat().st_mtime_ns
    launcher.update_discovery(tmp_path, [(RUN, TRAINING)])
    assert path.stat().st_mtime_ns == written  # Prometheus need not read it again
    launcher.update_discovery(tmp_path, [(RUN, ENDED)])
    assert list(path.parent.iterdir()) == []
