"""The verbs as a person types them, on a run that is on record, with a kubectl that answers from a folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.ddpctl.kubernetes_lab import DATA, run_of
from tests.in_process import Ended
from tests.in_process import ddpctl as call
from tests.wording import Wording

from ddpctl import run_store

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
    folder = run_store.create(root, "night")
    run_store.save(replace(run_of("night"), folder=str(folder)))
    return World(tmp_path / "cluster")


def ddpctl(world: World, *words: str, cwd: Path | None = None) -> Ended:
    return call(*words, cwd=cwd, PATH=str(world.folder), CLUSTER=str(world.folder))


def test_status_has_a_line_for_each_pod(world: World, wording: Wording) -> None:
    world.holds("created-pending", "pending-gpu", "pend-gpu")
    done = ddpctl(world, "status", "night")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    run, state, node, why = re.split(": |  ", lines[0], maxsplit=3)
    assert (run, state, node) == ("night", "starting", "night-worker-0")
    rows = [" ".join(line.split()) for line in lines[-2:]]
    assert rows == [f"{node} night-worker-{node}: {why} - - -" for node in (0, 1)]
    wording(lines[0])


def test_stop_clears_away_what_has_ended(world: World, wording: Wording) -> None:
    world.holds("succeeded", "succeeded", "succ")
    done = ddpctl(world, "stop", "night")
    assert done.returncode == 0
    wording(done.stderr)
    deleted = [call for call in world.calls() if " delete " in call]
    assert [call.split(" delete ")[1].split()[0] for call in deleted] == [
        "pytorchjobs.kubeflow.org",
        "pods",
        "configmaps,secrets,services,networkpolicies.networking.k8s.io",
    ]
    again = ddpctl(world, "stop", "night")
    assert again.returncode == 0
    wording(again.stderr)


def test_suspend_and_resume(world: World, wording: Wording) -> None:
    world.holds("running-after-container-restart", "restarted-once", "b-exit1-2")
    for verb in ("suspend", "resume"):
        done = ddpctl(world, verb, "night")
        assert done.returncode == 0
        wording(done.stderr)
    patches = [call.rsplit(" ", 1)[1] for call in world.calls() if " patch " in call]
    assert patches == ['{"spec":{"runPolicy":{"suspend":true}}}', '{"spec":{"runPolicy":{"suspend":false}}}']


def test_what_has_ended_cannot_be_suspended(world: World, wording: Wording) -> None:
    world.holds("succeeded", "succeeded", "succ")
    done = ddpctl(world, "suspend", "night")
    assert done.returncode == 2
    wording(done.stderr)


def test_an_attached_launch_prints_the_logs_and_ends_with_the_job(
    world: World, capfd: pytest.CaptureFixture[str], wording: Wording
) -> None:
    world.holds("succeeded", "succeeded", "succ")
    world.is_of("dawn")
    done = ddpctl(world, "launch", "-t", "kubernetes", "--kind", "pytorchjob", "--nodes", "2", "--name", "dawn")
    assert done.returncode == 0, done.stderr
    assert sorted(capfd.readouterr().out.splitlines()) == ["[node0 rank0] epoch 1/1", "[node1 rank0] epoch 1/1"]
    wording(re.sub(r"(?<=succeeded, after ).*", "{time}", done.stderr))
    text = (world.folder / "made").read_text()
    made = re.findall(r"^kind: (.*)$", text, re.M)
    assert sorted(made[:3]) == ["NetworkPolicy", "Pod", "PyTorchJob"]  # judged side by side
    assert (sorted(made[3:5]), made[5:]) == (["NetworkPolicy", "Secret"], ["PyTorchJob"])
    (secret,) = re.findall(r"store\.secret: '?(\w{64})", text)
    record = [path.read_text() for path in (world.folder.parent / "runs/dawn").rglob("*") if path.is_file()]
    assert record
    assert secret not in "".join((*record, *world.calls(), done.stderr))


def test_a_launch_that_is_refused_leaves_no_record(world: World, wording: Wording) -> None:
    (world.folder / "kubectl").write_text("#!/bin/bash\necho 'Unauthorized' >&2\nexit 1\n")
    done = ddpctl(world, "launch", "-t", "kubernetes", "--name", "dawn", "--detach")
    assert (done.returncode, done.stdout) == (69, "")
    wording(done.stderr)
    assert not (world.folder.parent / "runs/dawn").exists()


@pytest.mark.parametrize("project", ["['*.py']", "['*']"], ids=["scripts", "all"])
def test_no_secret_of_a_folder_goes_along(world: World, tmp_path: Path, project: str, wording: Wording) -> None:
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
    assert "[REDACTED]" in done.stdout
    assert "store.secret:" not in done.stdout
    maps = [text for text in done.stdout.split("END_OF_INPUT") if "kind: ConfigMap" in text]
    assert [yaml.safe_load(text[text.index("apiVersion") :])["data"] for text in maps] == [
        {"000-train.py": "print()\n"}
    ]
    wording(done.stderr)
