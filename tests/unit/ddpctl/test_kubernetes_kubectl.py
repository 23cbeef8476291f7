"""Which state or error each answer of a real cluster is: tests/data/kubernetes (its README has the versions).

``facts.txt`` has a line for every recording; a new one without its line fails.
"""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.kubernetes_lab import DATA, recorded, run_of

from ddpctl.job.spec import JobSpec
from ddpctl.runs.run_status import RunStatus
from ddpctl.targets.kubernetes.kubectl import error_of
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.status import fold, is_lost, unexplained

PYTORCHJOB = WORKLOADS["pytorchjob"]
KINDS = {"PyTorchJob": PYTORCHJOB, "Job": WORKLOADS["job"]}


def facts(kind: str) -> dict[str, list[str]]:
    """The rows of facts.txt, by the name of the recording."""
    rows = (line.split(" | ") for line in (DATA / "facts.txt").read_text().splitlines() if line.startswith(f"{kind}/"))
    return {name.removeprefix(f"{kind}/"): rest for name, *rest in rows}


BAD = [path.name.removesuffix(".stderr.txt") for path in sorted(DATA.glob("bad/*.stderr.txt"))]


def test_every_recording_has_its_facts() -> None:
    assert sorted(facts("bad")) == sorted(BAD)
    assert sorted(facts("state")) == sorted(states())


@pytest.mark.parametrize("name", BAD)
def test_an_error_of_the_cluster_has_its_type_and_names_what_it_concerns(name: str) -> None:
    kind, *named = facts("bad")[name]
    error = error_of(recorded(f"bad/{name}"))
    assert type(error).__name__ == kind
    assert [fact for fact in named if fact not in str(error)] == []


RECORDED = datetime(2026, 11, 20, 9, 8, tzinfo=UTC).timestamp()  # before the recorded pods' graces end


def states() -> dict[str, tuple[dict[str, Any], list[Any], list[Any]]]:
    """Every recorded state: the job, the pods and the warnings of the same name."""
    jobs = {path.stem: json.loads(path.read_text()) for path in DATA.glob("jobs/*.json")}
    jobs |= {path.stem.removesuffix("-job"): json.loads(path.read_text()) for path in DATA.glob("psa/*-job.json")}
    pods: dict[str, list[Any]] = {}
    for path in [*DATA.glob("pods/*.json"), *DATA.glob("psa/*-pods.json")]:
        answer = json.loads(path.read_text())
        pods[path.stem.removesuffix("-pods")] = answer.get("items", [answer])
    events: dict[str, list[Any]] = {}
    for path in [*DATA.glob("events/*.json"), *DATA.glob("psa/*-events.json")]:
        for event in json.loads(path.read_text())["items"]:
            if event["type"] == "Warning":
                events.setdefault(event["involvedObject"]["name"], []).append(event)
    of_job = {job["metadata"]["name"]: name for name, job in jobs.items()}
    recorded_states: dict[str, Any] = {}
    for name, group in pods.items():
        owner = _owner(group[0]) if group else ""
        empty = {"metadata": {"name": owner}, "spec": {}, "status": {}}
        job = jobs.get(name) or jobs.get(of_job.get(owner, "")) or empty
        recorded_states[name] = (job, group)
    recorded_states |= {name: (job, recorded_states.get(name, (0, []))[1]) for name, job in jobs.items()}
    for name, (job, some) in recorded_states.items():
        if not some and job["metadata"]["name"] in of_job:
            owned = [p for p in pods.values() if p and _owner(p[0]) == job["metadata"]["name"]]
            recorded_states[name] = (job, owned[0] if owned else [])
    return {
        name: (job, some, _warnings(events, job, some))
        for name, (job, some) in recorded_states.items()
        if job["metadata"]["name"]
    }


def _owner(pod: dict[str, Any]) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("training.kubeflow.org/job-name") or labels["job-name"])


def _warnings(events: dict[str, list[Any]], job: dict[str, Any], pods: list[Any]) -> list[Any]:
    """Of these objects alone whose events are asked for."""
    return [event for name in unexplained(PYTORCHJOB, job, pods, 2) for event in events.get(name, ())]


def status_of(name: str, now: float = RECORDED, **changes: Any) -> RunStatus:
    """The status of a recorded run; ``changes``: its job, pods or events, where they are others."""
    recording: dict[str, Any] = dict(zip(("job", "pods", "events"), states()[name], strict=True))
    roles = recording["job"]["spec"].get("pytorchReplicaSpecs", {})
    run = run_of(recording["job"]["metadata"]["name"], job=JobSpec(nodes="2"), master="Master" in roles)
    kind = KINDS[recording["job"].get("kind", "PyTorchJob")]
    return fold(run, kind, **{**recording, **changes}, now=now)


@pytest.mark.parametrize("name", sorted(states()))
def test_a_recorded_run_has_its_state_and_its_message_names_the_reason(name: str) -> None:
    expected, code, alive, *named = facts("state")[name]
    status = status_of(name)
    assert (status.state, "-" if status.code is None else str(int(status.code))) == (expected, code)
    assert (" ".join(str(node.node) for node in status.nodes if node.alive) or "-") == alive
    assert [fact for fact in named if fact not in status.message] == []


def test_a_pod_of_an_unreachable_machine_is_lost_when_its_grace_has_ended_and_another_one_later() -> None:
    metadata = {"deletionTimestamp": "2026-11-20T09:08:00Z"}
    tainted = {"metadata": metadata, "status": {"conditions": [{"reason": "DeletionByTaintManager"}]}}
    other = {"metadata": metadata}
    assert [is_lost(pod, RECORDED + late_s) for pod in (tainted, other) for late_s in (0, 60)] == [
        True,
        True,
        False,
        True,
    ]


def test_a_failed_pod_is_replaced_after_a_delay_that_doubles() -> None:
    pod = states()["indexed-failing"][1][0]
    notes = pod["metadata"].setdefault("annotations", {})
    notes["batch.kubernetes.io/job-index-failure-count"] = "2"
    pod["metadata"].pop("deletionTimestamp")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    ended |= {"exitCode": 137, "finishedAt": "2026-11-20T09:08:00Z"}
    note = next(
        node.note for node in status_of("indexed-failing", RECORDED + 15, pods=[pod]).nodes if node.note != "no pod"
    )
    assert_names(note, "25 s")


def test_a_deleted_job_is_stopping_while_it_has_pods() -> None:
    status = status_of("running", job=None)
    assert (status.state, status.ended, status.code) == ("stopping", False, None)
    assert "PyTorchJob" in status.message


@pytest.mark.parametrize(("done", "counted"), [(2, "all pods"), (1, "1 of 2 pods")])
def test_a_run_whose_pods_have_succeeded_is_stopping_until_its_job_has_ended(done: int, counted: str) -> None:
    job, pods, _ = states()["succeeded"]
    for pod in pods[done:]:
        pod["status"]["containerStatuses"][0]["state"] = {"running": {}}
    running = {**job, "status": {"conditions": [{"type": "Running", "status": "True"}]}}
    status = status_of("succeeded", job=running, pods=pods)
    assert (status.state, status.ended) == ("stopping", False)
    assert status.message.startswith(f"{counted} ")
