"""The program that follows the logs of pods, also of replaced ones, with a kubectl that answers from a folder."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.nodes import until
from tests.unit.ddpctl.kubernetes_lab import DATA, run_of

from ddpctl.runs import run_store
from ddpctl.targets.kubernetes.files import PLACED, keep_placed
from ddpctl.targets.kubernetes.log_follower import Task
from ddpwire import log_record
from ddpwire.history import HISTORY

# `get KIND...` prints the file KIND. `logs POD` prints the file POD line by line until POD.done is there, or POD.cut if
# the connection is lost. Two lines each have the same time.
KUBECTL = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [[ $1 == *=* ]] || shift; shift; done
case $1 in
  get) echo "${@:2}" >>"$CLUSTER/asked"; cat "$CLUSTER/${2%%/*}" 2>/dev/null ;;
  delete) echo "${@:2}" >>"$CLUSTER/deleted" ;;
  logs)
    pod=$2
    echo "$*" >>"$CLUSTER/followed"
    [[ $* == *--previous* ]] && { cat "$CLUSTER/$pod.previous"; exit; }
    shown=0 # --since-time knows whole seconds only, and all lines are of one second
    while :; do
      done=; [[ -e $CLUSTER/$pod.done || -e $CLUSTER/$pod.cut ]] && done=1
      mapfile -t lines <"$CLUSTER/$pod"
      for ((; shown < ${#lines[@]}; shown++)); do
        [[ $* != *--timestamps* ]] || printf '2026-11-20T09:00:00.%09dZ ' "$((shown / 2 + 1))"
        printf '%s\\n' "${lines[shown]}"
      done
      [[ $done ]] && exit
      sleep 0.05
    done ;;
esac
"""


class Cluster:
    """What kubectl answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "bin").mkdir()
        (folder / "bin/kubectl").write_text(KUBECTL)
        (folder / "bin/kubectl").chmod(0o755)
        self.job("running")
        self.pods()

    def job(self, state: str) -> None:
        self.answer("pytorchjobs.kubeflow.org", json.loads((DATA / f"jobs/{state}.json").read_text()))

    def pods(self, *pods: dict[str, Any]) -> None:
        self.answer("pods", {"kind": "List", "items": pods})

    def emit(self, pod: str, *lines: str) -> None:
        with (self.folder / pod).open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def answer(self, name: str, value: Any) -> None:
        temporary = self.folder / f".{name}"
        temporary.write_text(json.dumps(value))
        temporary.rename(self.folder / name)


def pod(node: int, uid: str, *, restarts: int = 0, state: str = "running", **extra: str) -> dict[str, Any]:
    details = {"running": {"startedAt": "t"}, "waiting": {"reason": "ContainerCreating"}}[state]
    return {
        "metadata": {
            "name": f"running-worker-{node}",
            "uid": uid,
            "creationTimestamp": f"2026-11-20T09:00:0{len(uid)}Z",
            "labels": {
                "training.kubeflow.org/replica-index": str(node),
                "training.kubeflow.org/replica-type": "worker",
            },
        },
        "status": {
            "phase": "Running",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-20T09:00:00Z"}],
            "containerStatuses": [{"name": "pytorch", "restartCount": restarts, "state": {state: details}}],
        },
    }


def start(cluster: Cluster, *, uid: str = "", created: float = 0.0, **given: Any) -> "subprocess.Popen[str]":
    folder = cluster.folder / "running"
    folder.mkdir(exist_ok=True)
    run_store.save(replace(run_of("running"), created=created, uid=uid, folder=str(folder)))
    task = {"folder": str(folder), "only": None, "only_nodes": (), "tail": None, "poll_s": 0.1}
    program = (sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.log_follower")
    argv = [*program, json.dumps(asdict(Task(**{**task, **given})))]
    env = {**os.environ, "PATH": f"{cluster.folder}/bin:/usr/bin:/bin", "CLUSTER": str(cluster.folder)}
    with (cluster.folder / "out").open("w") as out:
        return subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def following(cluster: Cluster, **given: Any) -> Iterator["subprocess.Popen[str]"]:
    """The program, which does not outlive its test."""
    with start(cluster, **given) as follower:
        try:
            yield follower
        finally:
            follower.kill()


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "cluster")


def printed(cluster: Cluster) -> list[str]:
    return sorted((cluster.folder / "out").read_text().splitlines())


def test_after_a_lost_connection_a_log_continues_after_its_last_line(cluster: Cluster) -> None:
    lines = [f"[node0 rank0] step {step}" for step in range(1, 7)]
    cluster.pods(pod(0, "x", restarts=1))
    (cluster.folder / "running-worker-0.previous").write_text("a line without its time\n")
    (cluster.folder / "there").mkdir()
    (cluster.folder / "there" / HISTORY).write_text("time\n1.0\n")
    record = [f"[node0] {line}" for line in log_record.pack(cluster.folder / "there", 60.0)]
    cluster.emit("running-worker-0", *record, *lines[:3])
    with following(cluster, tail=9) as follower:
        until(lambda: len(printed(cluster)) == 4)
        (cluster.folder / "running-worker-0.cut").touch()
        cluster.emit("running-worker-0", *lines[3:5])  # while nobody reads, or one of many short connections
        until(lambda: len(printed(cluster)) == 6)
        (cluster.folder / "running-worker-0.cut").unlink()
        cluster.emit("running-worker-0", lines[5])
        until(lambda: len(printed(cluster)) == 7)
        (cluster.folder / "running-worker-0.done").touch()
        cluster.job("succeeded")
        follower.communicate(timeout=60)
    assert printed(cluster) == [*lines, "a line without its time"]
    kept = cluster.folder / "running/node-0"
    assert ((kept / HISTORY).read_text(), (kept / PLACED).read_text()) == ("time\n1.0\n", "1795165200.0\n")
    keep_placed(kept.parent, {0: (9.0,)})
    assert (kept / PLACED).read_text() == "1795165200.0\n", "when it was first scheduled"
    _, first, *again = (cluster.folder / "followed").read_text().splitlines()
    assert again
    assert [("--tail 9" in call, "--since-time" in call) for call in (first, *again)] == [
        (True, False),
        *[(False, True)] * len(again),
    ]


def test_the_pod_of_a_machine_that_is_gone_is_deleted_once(cluster: Cluster) -> None:
    lost, ending = pod(0, "x"), pod(1, "y")
    lost["metadata"]["deletionTimestamp"] = "2026-11-20T09:08:30Z"
    ending["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    cluster.pods(lost, ending)
    with following(cluster, replace_lost=True) as follower:
        until((cluster.folder / "deleted").exists)
        cluster.pods(lost, pod(1, "yyy"))
        until(lambda: (cluster.folder / "asked").read_text().count("pods") > 5)
        (cluster.folder / "running-worker-0.done").touch()
        (cluster.folder / "running-worker-1.done").touch()
        cluster.job("succeeded")
        _, stderr = follower.communicate(timeout=60)
    assert "--force" not in stderr  # no advice to delete it again
    assert (cluster.folder / "deleted").read_text() == "pod running-worker-0 --force --grace-period=0 --wait=false\n"


def test_a_job_that_its_launch_still_creates_is_waited_for(cluster: Cluster) -> None:
    (cluster.folder / "pytorchjobs.kubeflow.org").write_text("")
    with following(cluster, created=time.time()) as follower:
        assert follower.stderr is not None
        assert follower.stderr.readline().startswith("[running] starting")


def test_a_cluster_that_does_not_answer_is_waited_for(cluster: Cluster) -> None:
    job = cluster.folder / "pytorchjobs.kubeflow.org"
    job.rename(cluster.folder / "kept")
    with following(cluster) as follower:
        line = follower.stderr.readline() if follower.stderr else ""
        assert line.startswith("[running] kubectl")
        assert "120 s" in line
        cluster.job("succeeded")
        follower.communicate(timeout=60)
    assert follower.returncode == 0


def test_a_cluster_that_does_not_answer_for_too_long_ends_the_follower(cluster: Cluster) -> None:
    (cluster.folder / "pytorchjobs.kubeflow.org").unlink()
    with following(cluster, unreachable_s=0.5) as follower:
        _, stderr = follower.communicate(timeout=60)
    assert follower.returncode == 69
    assert stderr.splitlines()[-1].startswith("ddpctl: kubectl")
    assert "0.5 s" in stderr.splitlines()[-1]
