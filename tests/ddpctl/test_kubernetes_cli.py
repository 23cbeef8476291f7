"""The verbs as a person types them, on a run that is on record, with a kubectl that answers from a folder."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.ddpctl.kubernetes_lab import DATA, run_of

from ddpctl import runs

# Writes down how it was called; `get KIND` prints the file KIND, once `delete` came nothing.
KUBECTL = """#!/bin/bash
echo "$*" >>"$CLUSTER/calls"
while [[ $1 == --* ]]; do [[ $1 == *=* ]] || shift; shift; done
case $1 in
  get) [[ -e $CLUSTER/deleted ]] || /bin/cat "$CLUSTER/${2%%/*}" 2>/dev/null ;;
  delete) : >"$CLUSTER/deleted" ;;
  config) /bin/cat "$CLUSTER/view" ;;
  create) /bin/cat >>"$CLUSTER/made"; echo --- >>"$CLUSTER/made"; echo uid-1 ;;
  logs) echo "[node${2##*-} rank0] epoch 1/1" ;;
esac
exit 0
"""


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "kubectl").write_text(KUBECTL)
        (folder / "kubectl").chmod(0o755)

    def holds(self, job: str, pods: str, old: str) -> None:
        for what, path in (("pytorchjobs.kubeflow.org", f"jobs/{job}"), ("pods", f"pods/{pods}")):
            answer: dict[str, Any] = json.loads((DATA / f"{path}.json").read_text().replace(f"{old}", "night"))
            for thing in answer.get("items", [answer]):
                thing["metadata"].setdefault("labels", {})["ddpctl.run"] = "night"
            (self.folder / what).write_text(json.dumps(answer))

    def is_of(self, run: str) -> None:
        """The objects are that run's."""
        for what in ("pytorchjobs.kubeflow.org", "pods"):
            if (path := self.folder / what).exists():
                path.write_text(path.read_text().replace("night", run))
        context = {"name": "lab", "context": {"namespace": "ml"}}
        (self.folder / "view").write_text(json.dumps({"current-context": "lab", "contexts": [context]}))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def world(tmp_path: Path) -> World:
    root = tmp_path / "runs"
    folder = runs.create(root, "night")
    runs.save(replace(run_of("night"), folder=str(folder)))
    return World(tmp_path / "cluster")


def ddpctl(world: World, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": str(world.folder), "CLUSTER": str(world.folder)}
    argv = [sys.executable, "-P", "-m", "ddpctl", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=env, cwd=cwd)


def test_status_has_a_line_for_each_pod(world: World) -> None:
    world.holds("created-pending", "pending-gpu", "pend-gpu")
    done = ddpctl(world, "status", "night")
    assert done.returncode == 0, done.stderr
    why = "no machine has enough nvidia.com/gpu free: wait for one, or ask for less (0/2 nodes are available)"
    lines = done.stdout.splitlines()
    assert lines[0] == f"night  starting: night-worker-0: {why}"
    rows = [" ".join(line.split()) for line in lines[-2:]]
    assert rows == [f"{node} night-worker-{node}: {why} - - -" for node in (0, 1)]


def test_stop_clears_away_what_has_ended(world: World) -> None:
    world.holds("succeeded", "succeeded", "succ")
    done = ddpctl(world, "stop", "night")
    assert (done.returncode, done.stderr) == (0, "run night had ended; what was left of it is gone\n")
    deleted = [call for call in world.calls() if " delete " in call]
    assert [call.split(" delete ")[1].split()[0] for call in deleted] == [
        "pytorchjobs.kubeflow.org",
        "pods",
        "configmaps,secrets,services,networkpolicies.networking.k8s.io",
    ]
    again = ddpctl(world, "stop", "night")
    assert (again.returncode, again.stderr) == (0, "run night has ended already: nothing to stop\n")


def test_suspend_and_resume(world: World) -> None:
    world.holds("running-after-container-restart", "restarted-once", "b-exit1-2")
    done = ddpctl(world, "suspend", "night")
    assert (done.returncode, done.stderr) == (
        0,
        "night is suspended: its ranks have 30 s to save; ddpctl resume night goes on\n",
    )
    done = ddpctl(world, "resume", "night")
    assert (done.returncode, done.stderr) == (0, "night goes on: ddpctl logs -f night\n")
    patches = [call.rsplit(" ", 1)[1] for call in world.calls() if " patch " in call]
    assert patches == ['{"spec":{"runPolicy":{"suspend":true}}}', '{"spec":{"runPolicy":{"suspend":false}}}']


def test_what_has_ended_cannot_be_suspended(world: World) -> None:
    world.holds("succeeded", "succeeded", "succ")
    done = ddpctl(world, "suspend", "night")
    assert (done.returncode, done.stderr) == (
        2,
        "ddpctl: night has ended already (succeeded): ddpctl launch --resume night goes on from it\n",
    )


def test_an_attached_launch_prints_the_logs_and_ends_with_the_job(world: World) -> None:
    world.holds("succeeded", "succeeded", "succ")
    world.is_of("dawn")
    done = ddpctl(world, "launch", "-t", "kubernetes", "--kind", "pytorchjob", "--nodes", "2", "--name", "dawn")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[node0 rank0] epoch 1/1", "[node1 rank0] epoch 1/1"]
    said = done.stderr.splitlines()
    assert said[:3] == [
        "run dawn: 2 nodes x 1 rank of ddptrain on kubernetes (--target)",
        "  a PyTorchJob in namespace ml of context lab (as you said); checkpoints go with their pod: "
        "mounts [pvc=CLAIM:/runs] keeps them; "
        "the pods have no limit of cpus and memory: the job's cpus and memory set one",
        "  logs         ddpctl logs dawn",
    ]
    assert said[3].startswith("run dawn succeeded, after ")
    assert said[4:] == ["  logs         ddpctl logs dawn", "  checkpoints  /runs/dawn/checkpoints"]
    made = re.findall(r"^kind: (.*)$", (world.folder / "made").read_text(), re.M)
    assert sorted(made[:3]) == ["NetworkPolicy", "Pod", "PyTorchJob"]  # judged side by side
    assert made[3:] == ["NetworkPolicy", "PyTorchJob"]


def test_a_launch_that_is_refused_leaves_no_record(world: World) -> None:
    (world.folder / "kubectl").write_text("#!/bin/bash\necho 'Unauthorized' >&2\nexit 1\n")
    done = ddpctl(world, "launch", "-t", "kubernetes", "--name", "dawn", "--detach")
    assert (done.returncode, done.stdout, done.stderr) == (
        69,
        "",
        "ddpctl: the cluster does not know you (401): sign in again, as your cluster wants it\n",
    )
    assert not (world.folder.parent / "runs/dawn").exists()


@pytest.mark.parametrize("project", ["['*.py']", "['*']"])
def test_no_secret_of_a_folder_goes_along(world: World, tmp_path: Path, project: str) -> None:
    """In a folder that is no git repository, where nothing is ignored."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in ("credentials.json", "secrets.yaml", ".env"):
        (folder / name).write_text("canary")
    (folder / "train.py").write_text("print()\n")
    (folder / "ddpctl.yaml").write_text(
        "job: {cpus: 1, memory: 9Gi, env: {A: in-spec}, mounts: ['pvc=a:/runs']}\n"
        f"target: lab\ntargets: {{lab: {{kind: kubernetes, project: {project}}}}}\n"
    )
    world.is_of("dawn")
    done = ddpctl(world, "launch", "--kind", "job", "--dry-run", "--name", "dawn", "--", "train.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout
    maps = [text for text in done.stdout.split("END_OF_INPUT") if "kind: ConfigMap" in text]
    assert [yaml.safe_load(text[text.index("apiVersion") :])["data"] for text in maps] == [
        {"000-train.py": "print()\n"}
    ]
    left_out = (
        ""
        if project == "['*.py']"
        else (
            "; left out, since their names say that they hold secrets: .env, credentials.json, secrets.yaml (one that "
            "the target's 'project' names itself goes along)"
        )
    )
    assert done.stderr == (
        f"# a Job in namespace ml of context lab (as you said); 1 file goes along, 1 kB: train.py{left_out}\n"
    )
