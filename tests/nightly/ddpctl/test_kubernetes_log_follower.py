"""A follower of logs while pods are replaced and a job is."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.kubernetes_lab import DATA
from tests.unit.ddpctl.test_kubernetes_log_follower import Cluster, pod, printed, start

from ddpwire import log_record
from ddpwire.events import EVENTS, EventLog


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


def test_the_logs_of_every_pod_and_of_its_replacement_are_printed_once(cluster: Cluster) -> None:
    follower = start(cluster)
    try:
        cluster.emit("running-worker-0", "[node0 rank0] a")
        cluster.emit("running-worker-1", "[node1 rank1] b")
        cluster.pods(pod(0, "x"), pod(1, "y", state="waiting"))
        until(lambda: printed(cluster) == ["[node0 rank0] a"])
        cluster.pods(pod(0, "x"), pod(1, "y"))
        until(lambda: len(printed(cluster)) == 2)
        (cluster.folder / "running-worker-1.done").touch()
        (cluster.folder / "running-worker-1").write_text("[node1 rank1] new\n")
        (cluster.folder / "running-worker-1.previous").write_text("[node1 rank1] last words\n")
        cluster.pods(pod(0, "x"), pod(1, "yy", restarts=1))
        until(lambda: "[node1 rank1] new" in printed(cluster))
        cluster.emit("running-worker-0", "[node0 rank0] the end")
        (cluster.folder / "running-worker-0.done").touch()
        cluster.job("succeeded")
        _, stderr = follower.communicate(timeout=60)
    finally:
        follower.kill()
    assert follower.returncode == 0
    assert printed(cluster) == [
        "[node0 rank0] a",
        "[node0 rank0] the end",
        "[node1 rank1] b",
        "[node1 rank1] last words",
        "[node1 rank1] new",
    ]
    assert any(line.startswith("[running] ") and "2 of 2 pods" in line for line in stderr.splitlines())


def test_nothing_is_left_of_a_follower_that_was_killed(cluster: Cluster) -> None:
    cluster.emit("running-worker-0", "[node0 rank0] a")
    cluster.pods(pod(0, "x"))
    follower = start(cluster)
    until(lambda: printed(cluster) == ["[node0 rank0] a"])
    mine = f"CLUSTER={cluster.folder}".encode()

    def alive() -> list[str]:
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mine in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(folder.name)
        return pids

    assert len(alive()) >= 2
    follower.kill()
    follower.communicate()
    until(lambda: not alive())


@pytest.mark.parametrize("labels", [None, {"ddpctl.uid": "f00dfeed0000"}])
def test_a_job_that_is_gone_ends_the_follower_even_if_another_has_its_name(
    cluster: Cluster, labels: dict[str, str] | None
) -> None:
    job: dict[str, Any] = json.loads((DATA / "jobs/running.json").read_text())
    job["metadata"]["labels"] = labels
    job = job if labels else {"kind": "List"}
    cluster.answer("pytorchjobs.kubeflow.org", job)
    follower = start(cluster, uid="4c1f5a1e2b3d")
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert "pods --selector ddpctl.run=running,ddpctl.uid=4c1f5a1e2b3d" in (cluster.folder / "asked").read_text()


def test_the_lines_of_one_rank_are_printed_and_the_nodes_records_are_saved(cluster: Cluster) -> None:
    events = EventLog(cluster.folder / "there" / EVENTS, node=1)
    (cluster.folder / "there").mkdir()
    events.emit("node_ended", code=0)
    record = [f"[node1] {line}" for line in log_record.pack(cluster.folder / "there", 1e6)]
    cluster.emit("running-worker-0", "[node0 rank0] a")
    cluster.emit("running-worker-1", *record, "[node1] up", "[node1 rank2] c", "[node1 rank3] d", "[node1 rank33] e")
    for node in (0, 1):
        (cluster.folder / f"running-worker-{node}.done").touch()
    cluster.pods(pod(0, "x"), pod(1, "y"))
    cluster.job("succeeded")
    follower = start(cluster, only=r"^\[node[0-9]+ rank(3)\] ", only_nodes=(1,))
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert printed(cluster) == ["[node1 rank3] d"]
    kept = cluster.folder / "running/node-1" / EVENTS
    assert kept.read_text() == (cluster.folder / "there" / EVENTS).read_text()
