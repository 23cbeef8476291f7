"""The whole road on a real cluster: train, look, lose pods, rest, stop. `make cluster-k8s` runs it where there is one.

One namespace of its own, deleted afterwards. DDPCTL_TEST_KIND says what runs the jobs (auto: what the cluster serves);
DDPCTL_TEST_CLASS names a StorageClass that offers ReadWriteMany; without it the runs are in a folder of the machines.
DDPCTL_TEST_LOSE and DDPCTL_TEST_FIND are shell commands that take a machine away and give it back, {machine} being its
name (kind: "docker pause {machine}", "docker unpause {machine}").
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.driver import ROOT, ddpctl, start
from tests.nightly.kubernetes.kubernetes_cluster import (
    DEFAULT_VOLUME,
    Cluster,
    fingerprint,
    logs,
    name_of,
    resumed_at,
    status,
    step_of,
    wait_until,
    why_not,
)

WHY_NOT = why_not()
pytestmark = [pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)), pytest.mark.timeout(1800)]
KIND = os.environ.get("DDPCTL_TEST_KIND", "auto")
KEPT = {name: os.environ[name] for name in ("PATH", "KUBECONFIG", "HOME", "DDPCTL_TEST_IMAGE") if name in os.environ}
OPTIONAL = ("DDPCTL_TEST_CLASS", "DDPCTL_TEST_LOSE", "DDPCTL_TEST_FIND")
KEPT |= {name: os.environ[name] for name in OPTIONAL if name in os.environ}  # a test's own environment is empty
LONG = ("ddptrain", "--epochs", "4000", "--deterministic")
SHORT = ("ddptrain", "--epochs", "10", "--deterministic")


@pytest.fixture(scope="module")
def namespace() -> Iterator[tuple[Cluster, bool]]:
    """The namespace, and whether all machines see the same folder."""
    cluster = Cluster(
        kubectl=str(shutil.which("kubectl", path=KEPT["PATH"])),
        namespace=f"ddpctl-test-{uuid.uuid4().hex[:8]}",
        image=KEPT["DDPCTL_TEST_IMAGE"],
        storage_class=KEPT.get("DDPCTL_TEST_CLASS"),
        volume="pvc=runs" if "DDPCTL_TEST_CLASS" in KEPT else DEFAULT_VOLUME,
    )
    environ = {**os.environ, **KEPT}
    make = [cluster.kubectl, "create", "namespace", cluster.namespace]
    subprocess.run(make, check=True, capture_output=True, timeout=60, env=environ)
    try:
        yield cluster, cluster.prepare_volume()
    finally:
        drop = [cluster.kubectl, "delete", "namespace", cluster.namespace, "--timeout=180s"]
        subprocess.run(drop, check=True, capture_output=True, timeout=240, env=environ)


@pytest.fixture
def cluster(namespace: tuple[Cluster, bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    for name, value in KEPT.items():
        monkeypatch.setenv(name, value)
    yield namespace[0]
    for run in [path.name for path in (tmp_path / "runs").glob("[!.]*")]:
        ddpctl("stop", "--kill", run, timeout=300)
        assert namespace[0].left_of(run) == ""


@pytest.fixture
def shared(namespace: tuple[Cluster, bool]) -> None:
    if not namespace[1]:
        pytest.skip(f"{namespace[0].volume} is each machine's own: DDPCTL_TEST_CLASS=NAME of a shared StorageClass")


def configuration(cluster: Cluster, path: Path, *, runtime: str | None = None, **job: object) -> Path:
    """A file for 2 x 2 CPU ranks."""
    settings = {
        "job": {
            "name": "digits", "nodes": "2", "gpus": 2, "device": "cpu", "cpus": 1, "memory": "3Gi", "shm": "256Mi",
            "image": cluster.image, "mounts": [f"{cluster.volume}:/runs"], "grace": 20, **job,
        },
        "target": "lab",
        "targets": {
            "lab": {"kind": "kubernetes", "namespace": cluster.namespace, "workload": KIND, "runtime": runtime},
        },
    }  # fmt: skip
    path.write_text(yaml.safe_dump(settings))
    return path


def launch(cluster: Cluster, tmp_path: Path, name: str, *program: str, attached: bool = False, **job: Any) -> str:
    """A run; what ddpctl said."""
    path = configuration(cluster, tmp_path / f"{name}.yaml", **job)
    options = () if attached else ("--detach",)
    done = ddpctl("launch", "-f", str(path), "--name", name, *options, "--", *program, cwd=tmp_path, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_digits_on_two_pods_reach_98_percent_with_the_weights_of_one(cluster: Cluster, tmp_path: Path) -> None:
    two = launch(cluster, tmp_path, name_of("two"), *SHORT, attached=True)
    assert float(re.search(r"test accuracy\s+([0-9.]+) %", two)[1]) >= 98.0  # type: ignore[index]
    assert re.search(r"world size\s+4\b", two)
    single = launch(cluster, tmp_path, name_of("one"), *SHORT, attached=True, nodes="1", gpus=4)
    assert fingerprint(single) == fingerprint(two)
    here = ddpctl("launch", "--target", "local", "--nodes", "2", "--gpus", "2", "--name", "here", "--", *SHORT)
    assert here.returncode == 0, here.stderr
    versions = [re.search(r"torch ([0-9.]+)", text) for text in (two, here.stdout + here.stderr)]
    if versions[0] and versions[1] and versions[0][1] == versions[1][1]:  # bit for bit holds for one build of torch
        assert fingerprint(here.stdout + here.stderr) == fingerprint(two)


def test_the_checked_in_spec_works_as_it_stands(cluster: Cluster, tmp_path: Path) -> None:
    served = cluster.run("api-resources", "--output", "name").split()
    kind = ("pytorchjob" if "pytorchjobs.kubeflow.org" in served else "job") if KIND == "auto" else KIND
    spec, resource = {
        "pytorchjob": ("pytorchjob", "pytorchjobs.kubeflow.org"),
        "trainjob": ("trainjob", "trainjobs.trainer.kubeflow.org"),
        "job": ("indexed-job", "jobs.batch"),
    }[kind]
    text = (ROOT / f"k8s/{spec}.yaml").read_text()
    (tmp_path / "spec.yaml").write_text(text)
    image, _, tag = cluster.image.rpartition(":")
    change = {"name": "ghcr.io/ddpctl/ddpctl", "newName": image, "newTag": tag}
    kustomization = {"resources": ["spec.yaml"], "images": [change], "sortOptions": {"order": "fifo"}}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    number = len(list(yaml.safe_load_all(text)))
    # The webhook of Kubeflow Trainer may not see the runtime of the same file yet.
    wait_until(
        lambda: cluster.run("apply", "-k", str(tmp_path), check=False).count("\n") >= number, "the spec to be taken", 60
    )
    try:
        done = ("Succeeded", "Complete")
        wait_until(
            lambda: [
                condition for condition in cluster.get(f"{resource}/digits")[0].get("status", {}).get("conditions", ())
                if condition["type"] in done and condition["status"] == "True"
            ],
            f"k8s/{spec}.yaml to end",
        )  # fmt: skip
    finally:
        cluster.run("delete", "-k", str(tmp_path))


@pytest.mark.skipif(KIND != "trainjob", reason="only a TrainJob has a runtime: DDPCTL_TEST_KIND=trainjob")
def test_a_run_takes_over_the_fields_of_a_runtime_of_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    container = {"name": "node", "image": "other", "env": [{"name": "SITE", "value": "here"}]}
    pod = {"metadata": {"labels": {"team": "vision"}}, "spec": {"containers": [container]}}
    job = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"template": pod},
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": "platform"},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}},
        },
    }
    cluster.run("create", "--filename", "-", stdin=json.dumps(runtime))
    run = name_of("based")
    launch(cluster, tmp_path, run, *SHORT, runtime="TrainingRuntime/platform")
    wait_until(lambda: status(run)["state"] == "succeeded", "the end")
    pods = cluster.get("pods", "--selector", f"ddpctl.run={run},team=vision")
    assert len(pods) == 2
    assert all(pod["spec"]["containers"][0]["env"].count(container["env"][0]) == 1 for pod in pods)  # type: ignore[index]


def test_status_and_logs_at_each_stage_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("stages")
    launch(cluster, tmp_path, run, *LONG)
    assert status(run)["state"] in ("starting", "rendezvous", "running")
    wait_until(lambda: status(run)["state"] == "running", "both pods")
    wait_until(lambda: step_of(run) >= 2, "the second epoch")
    assert status(run)["message"] == "2 of 2 pods running"
    assert {line.split("]")[0] for line in logs(run, "--rank", "3").splitlines()} <= {"[node1 rank3"}
    assert "[node0" not in logs(run, "--node", "1")
    pulled = ddpctl("pull", run, "--into", str(tmp_path / "pulled"))
    assert pulled.returncode == 0, pulled.stderr
    assert {path.name for path in (tmp_path / "pulled").glob("node-*")} == {"node-0", "node-1"}
    assert ddpctl("stop", run, timeout=300).returncode == 0
    assert status(run)["state"] == "stopped"
    assert cluster.left_of(run) == ""
    phases = json.loads(ddpctl("timeline", run, "--json").stdout)["seconds"]
    assert phases["training"] > 0
    if cluster.volume.startswith("pvc="):
        again = ddpctl("pull", run, "--into", str(tmp_path / "claim"), timeout=600)
        assert again.returncode == 0, again.stderr
        assert list((tmp_path / "claim/checkpoints").glob("step-*.pt"))
        assert cluster.run("get", "pods", "--output", "name") == ""
    assert ddpctl("rm", run, timeout=300).returncode == 0


def test_an_ended_runs_timeline_is_in_its_pods_logs(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("ended")
    launch(cluster, tmp_path, run, *SHORT)
    wait_until(lambda: status(run)["state"] == "succeeded", "the end")
    for _ in range(2):  # from the logs, and from what stop has kept of them
        phases = json.loads(ddpctl("timeline", run, "--json").stdout)["seconds"]
        assert phases["training"] > 0
        assert ddpctl("stop", run, timeout=300).returncode == 0
    assert "ddprun-record" not in logs(run)


def followers_of(cluster: Cluster) -> list[str]:
    """The command lines of all processes that follow a pod of the namespace."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if cluster.namespace in arguments and "logs" in arguments:
                processes.append(" ".join(arguments))
    return processes


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_follows_the_pods_of_a_ddpctl_that_is_gone(
    cluster: Cluster, tmp_path: Path, end: signal.Signals
) -> None:
    run = name_of("follow")
    launch(cluster, tmp_path, run, *LONG)
    wait_until(lambda: step_of(run) >= 1, "the first epoch")
    with start("logs", "-f", run) as follower:
        wait_until(lambda: followers_of(cluster), "it to follow")
        follower.send_signal(end)
        follower.communicate(timeout=60)  # nobody holds its pipe open
    wait_until(lambda: not followers_of(cluster), "all to end", 30)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_of_a_launch_that_was_killed(cluster: Cluster, tmp_path: Path, seed: int) -> None:
    run = name_of(f"killed{seed}")
    path = configuration(cluster, tmp_path / "ddpctl.yaml")
    with start("launch", "-f", str(path), "--name", run, "--detach", "--", *LONG) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random.Random(seed).uniform(0.5, 5.0))
        process.kill()
    ddpctl("stop", "--kill", run, timeout=300)
    wait_until(lambda: cluster.left_of(run) == "", "all to be gone", 60)


def test_what_cannot_be_placed_says_why(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("huge")
    launch(cluster, tmp_path, run, *LONG, cpus=1000)
    wait_until(lambda: "no machine has enough free cpu" in str(status(run)["message"]), "the reason")
    assert ddpctl("logs", run).returncode == 66


def goes_on_after(cluster: Cluster, run: str, node: str, take: str) -> list[int]:
    """Take a node's pod away in the middle; the steps at which the training continued."""
    wait_until(lambda: step_of(run) >= 3, "the third epoch")
    before = cluster.pods(run)
    pod = cluster.pod_name(run, before[node])
    survivors = {uid for other, uid in before.items() if other != node}
    if take == "evict":
        cluster.evict(pod)
    else:
        cluster.run("delete", "pod", pod, "--wait=false")
    wait_until(lambda: cluster.pods(run).get(node, before[node]) != before[node], f"a new pod for node {node}")
    wait_until(lambda: resumed_at(run), "the training to continue")
    reached = step_of(run)
    wait_until(lambda: step_of(run) > reached + 1, "two more epochs")
    assert status(run)["state"] == "running"
    assert cluster.restarts(run, survivors) == 0  # they have waited in their containers
    return resumed_at(run)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("node", ["1", "0"])
def test_a_pod_that_is_deleted_is_replaced_and_the_training_goes_on(
    cluster: Cluster, tmp_path: Path, node: str
) -> None:
    run = name_of(f"lost{node}")
    launch(cluster, tmp_path, run, *LONG)
    assert min(goes_on_after(cluster, run, node, "delete")) > 1


@pytest.mark.usefixtures("shared")
def test_an_eviction_with_its_grace_loses_no_step(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("evicted")
    launch(cluster, tmp_path, run, *LONG)
    at = goes_on_after(cluster, run, "1", "evict")
    saved = [int(number) for number in re.findall(r"step-0*(\d+)\.pt", logs(run))]
    assert at[0] == max(number for number in saved if number < at[0]) + 1


@pytest.mark.usefixtures("shared")
def test_suspend_gives_the_machines_back_and_resume_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("rest")
    launch(cluster, tmp_path, run, *LONG)
    wait_until(lambda: step_of(run) >= 3, "the third epoch")
    done = ddpctl("suspend", run)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not cluster.pods(run) and status(run)["state"] == "suspended", "the pods to end")
    assert ddpctl("resume", run).returncode == 0
    wait_until(lambda: resumed_at(run), "the training to continue")
    assert resumed_at(run)[0] > 1


def test_a_command_in_a_node_and_a_secret_in_a_rank(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = name_of("secret")
    monkeypatch.setenv("CANARY", "c4nary-value")
    (tmp_path / "train.py").write_text(
        "import os, time\nprint('length', len(os.environ['CANARY']), flush=True)\ntime.sleep(600)\n"
    )
    launch(cluster, tmp_path, run, "train.py", secrets=["CANARY"])
    wait_until(lambda: logs(run).count("length 12") == 4, "every rank to have it")
    pod = cluster.pod_name(run, cluster.pods(run)["1"])
    assert cluster.run("exec", pod, "--", "cat", "/workspace/train.py").startswith("import os, time")
    everything = "".join(path.read_text() for path in (tmp_path / "runs" / run).rglob("*") if path.is_file())
    assert "c4nary" not in everything + cluster.run("get", "pods", "--output", "yaml")


def test_pod_security_is_told_before_anything_is_made(cluster: Cluster, tmp_path: Path) -> None:
    label = "pod-security.kubernetes.io/enforce"
    cluster.run("label", "namespace", cluster.namespace, f"{label}=restricted")
    try:
        path = tmp_path / "ddpctl.yaml"
        job = {"image": cluster.image, "device": "cpu", "mounts": ["/mnt:/data"]}
        target = {"kind": "kubernetes", "namespace": cluster.namespace, "workload": KIND}
        path.write_text(yaml.safe_dump({"job": job, "target": "lab", "targets": {"lab": target}}))
        done = ddpctl("launch", "-f", str(path), "--detach", "--name", "refused")
        assert (done.returncode, done.stdout) == (78, "")
        assert done.stderr.startswith("ddpctl: the namespace admits only pods of Pod Security restricted:")
        assert cluster.left_of("refused") == ""
    finally:
        cluster.run("label", "namespace", cluster.namespace, f"{label}-")


@pytest.mark.usefixtures("shared")
@pytest.mark.skipif("DDPCTL_TEST_LOSE" not in KEPT, reason="needs DDPCTL_TEST_LOSE and DDPCTL_TEST_FIND")
def test_a_machine_that_is_lost_costs_its_pod_alone(cluster: Cluster, tmp_path: Path) -> None:
    run = name_of("gone")
    path = configuration(cluster, tmp_path / "ddpctl.yaml")
    attached = start("launch", "--replace-lost", "-f", str(path), "--name", run, "--", *LONG)
    wait_until(lambda: (tmp_path / "runs" / run).exists() and step_of(run) >= 3, "the third epoch")
    before = cluster.pods(run)
    (pod,) = [
        listed
        for listed in cluster.get("pods", "--selector", f"ddpctl.run={run}")
        if listed["metadata"]["uid"] == before["1"]
    ]
    machine = pod["spec"]["nodeName"]
    subprocess.run(os.environ["DDPCTL_TEST_LOSE"].format(machine=machine), shell=True, check=True, timeout=60)  # noqa: S602
    try:
        wait_until(lambda: cluster.pods(run).get("1", before["1"]) != before["1"], "a new pod", 600)
        wait_until(lambda: resumed_at(run), "the training to continue", 600)
    finally:
        subprocess.run(os.environ["DDPCTL_TEST_FIND"].format(machine=machine), shell=True, check=True, timeout=60)  # noqa: S602
        attached.kill()
        attached.communicate(timeout=60)
