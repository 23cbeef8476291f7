"""What a person reads for each answer of a real cluster: tests/data/kubernetes, Kubernetes 1.32, training-operator 1.9.

``sentences.txt`` has a line for every recording; a new one without its line fails.
"""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.ddpctl.kubernetes_lab import DATA, recorded, run_of
from tests.wording import Wording

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.spec import JobSpec
from ddpctl.targets.kubernetes.kubectl import error_of
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.status import fold, unexplained

PYTORCHJOB = WORKLOADS["pytorchjob"]


def sentences(kind: str) -> dict[str, str]:
    """``bad/api-dns | Unavailable | sentence``: by the recording's name."""
    lines = (DATA / "sentences.txt").read_text().splitlines()
    rows = [line.split(" | ", 1) for line in lines if line.startswith(f"{kind}/")]
    return {name.removeprefix(f"{kind}/"): rest for name, rest in rows}


BAD = [path.name.removesuffix(".stderr.txt") for path in sorted(DATA.glob("bad/*.stderr.txt")) if path.stat().st_size]


def test_every_recording_has_its_sentence() -> None:
    assert sorted(sentences("bad")) == sorted(BAD)
    assert sorted(sentences("state")) == sorted(states())


@pytest.mark.parametrize("name", BAD)
def test_what_is_said_of_a_refusal(name: str) -> None:
    error = error_of(recorded(f"bad/{name}"))
    assert f"{type(error).__name__.removesuffix('Error')} | {error}" == sentences("bad")[name]


REFUSED = "The connection to the server {} was refused - did you specify the right host or port?\n"


@pytest.mark.parametrize(
    ("kind", "stderr"),
    [
        (UnavailableError, REFUSED.format("10.0.0.1:6443")),
        (UnavailableError, REFUSED.format("localhost:8080")),
        (ConfigError, "error: cannot locate context prodd\n"),
        (UnavailableError, "error: \x1b[31modd\n"),
        (UnavailableError, ""),
    ],
    ids=["refused", "no cluster", "no context", "unknown", "nothing"],
)
def test_an_answer_that_was_not_recorded(kind: type[DdpctlError], stderr: str, wording: Wording) -> None:
    error = error_of(Output(returncode=1, stderr=stderr))
    assert type(error) is kind
    wording(error)


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
    found = {}
    for name, some in pods.items():
        owner = some[0]["metadata"]["labels"]["training.kubeflow.org/job-name"] if some else ""
        empty = {"metadata": {"name": owner}, "spec": {}, "status": {}}
        job = jobs.get(name) or jobs.get(of_job.get(owner, "")) or empty
        found[name] = (job, some)
    found |= {name: (job, found.get(name, (0, []))[1]) for name, job in jobs.items()}
    for name, (job, some) in found.items():
        if not some and job["metadata"]["name"] in of_job:
            mine = [p for p in pods.values() if p and _owner(p[0]) == job["metadata"]["name"]]
            found[name] = (job, mine[0] if mine else [])
    return {
        name: (job, some, _warnings(events, job, some))
        for name, (job, some) in found.items()
        if job["metadata"]["name"]
    }


def _owner(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["training.kubeflow.org/job-name"])


def _warnings(events: dict[str, list[Any]], job: dict[str, Any], pods: list[Any]) -> list[Any]:
    """Of these objects alone whose events are asked for."""
    return [event for name in unexplained(PYTORCHJOB, job, pods, 2) for event in events.get(name, ())]


def line_of(job: dict[str, Any], pods: list[Any], events: list[Any]) -> str:
    roles = job["spec"].get("pytorchReplicaSpecs", {})
    run = run_of(job["metadata"]["name"], job=JobSpec(nodes="2"), master="Master" in roles)
    state = fold(run, PYTORCHJOB, job, pods, events, now=RECORDED)
    code = "" if state.code is None else f" {int(state.code)}"
    return " | ".join([f"{state.state}{code}", state.message, *(report.note for report in state.nodes)])


@pytest.mark.parametrize("name", sorted(states()))
def test_what_is_said_of_a_state(name: str) -> None:
    assert line_of(*states()[name]) == sentences("state")[name]


def test_a_pod_that_outlives_its_grace_names_its_machine(wording: Wording) -> None:
    job, pods, events = states()["terminating"]
    run = run_of(job["metadata"]["name"], job=JobSpec(nodes="2"))
    state = fold(run, PYTORCHJOB, job, pods, events, now=RECORDED + 3600)
    assert state.state == "rendezvous"
    wording(state.message)


def test_a_deleted_job_is_stopping_while_it_has_pods(wording: Wording) -> None:
    job, pods, _ = states()["running"]
    run = run_of(job["metadata"]["name"], job=JobSpec(nodes="2"))
    state = fold(run, PYTORCHJOB, None, pods, [], now=RECORDED)
    assert (state.state, state.ended, state.code) == ("stopping", False, None)
    wording(state.message)


def test_pods_that_have_succeeded_before_their_job_says_so(wording: Wording) -> None:
    job, pods, _ = states()["succeeded"]
    running = {**job, "status": {"conditions": [{"type": "Running", "status": "True"}]}}
    run = run_of(job["metadata"]["name"], job=JobSpec(nodes="2"))
    state = fold(run, PYTORCHJOB, running, pods, [], now=RECORDED)
    assert (state.state, state.ended) == ("stopping", False)
    wording(state.message)
    pods[1]["status"]["containerStatuses"][0]["state"] = {"running": {}}
    one = fold(run, PYTORCHJOB, running, pods, [], now=RECORDED)
    assert (one.state, one.message) == (
        "stopping",
        "1 of 2 pods have ended with exit code 0; the PyTorchJob has not ended yet",
    )


def test_a_job_that_is_being_suspended_does_not_replace_its_pods() -> None:
    job, pods, _ = states()["terminating"]
    job["spec"]["runPolicy"]["suspend"] = True
    state = fold(run_of(job["metadata"]["name"], job=JobSpec(nodes="2")), PYTORCHJOB, job, pods, [], now=RECORDED)
    assert (state.state, "replaced" in state.message) == ("stopping", False)


PULLING = 'failed to pull and unpack image "reg:5000/t:1": failed to resolve reference "reg:5000/t:1": '


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ('failed to do request: Head "https://reg:5000/v2/t": dial tcp 10.0.0.1:5000: i/o timeout',
         "dial tcp 10.0.0.1:5000: i/o timeout"),
        ("unexpected status from HEAD request: 500 Internal Server Error",
         "unexpected status from HEAD request: 500 Internal Server Error"),
        ("reg:5000/t:1: not found", "the registry has no such image or tag"),
    ],
)  # fmt: skip
def test_why_an_image_cannot_be_pulled_is_one_line_that_stays(cause: str, says: str) -> None:
    """Whether the kubelet tries, waits, or (before 1.31) has the cause in an event alone."""
    job, pods, _ = states()["imagepullbackoff"]
    run = run_of(job["metadata"]["name"], job=JobSpec(nodes="2"))
    event = {
        "reason": "Failed",
        "message": f'Failed to pull image "reg:5000/t:1": rpc error: code = Unknown desc = {PULLING}{cause}',
    }
    told = []
    for reason, message, events in (
        ("ErrImagePull", f"{PULLING}{cause}", []),
        ("ErrImagePull", f"rpc error: code = NotFound desc = {PULLING}{cause}", []),
        ("ImagePullBackOff", f'Back-off pulling image "reg:5000/t:1": ErrImagePull: {PULLING}{cause}', []),
        ("ImagePullBackOff", 'Back-off pulling image "reg:5000/t:1"', [event]),
    ):
        for pod in pods:
            found = pod["status"]["containerStatuses"][0]
            found["state"], found["image"] = {"waiting": {"reason": reason, "message": message}}, "reg:5000/t:1"
        of_pod = [{**one, "involvedObject": {"name": pods[0]["metadata"]["name"]}} for one in events]
        told.append(fold(run, PYTORCHJOB, job, pods, of_pod, now=RECORDED).message.partition(": ")[2])
    assert set(told) == {f"the image reg:5000/t:1 cannot be pulled: {says}"}


QUOTA = (
    'Error from server (Forbidden): pods "x-worker-0" is forbidden: exceeded quota: team, '
    "requested: pods=1,requests.cpu=2, used: pods=4,requests.cpu=8, limited: pods=4,requests.cpu=8"
)
SECRETS = (
    'Error from server (Forbidden): error when creating "STDIN": secrets is forbidden: User "ann" cannot create '
    'resource "secrets" in API group "" in the namespace "ml"'
)


@pytest.mark.parametrize("text", [QUOTA, SECRETS], ids=["two quotas", "secrets"])
def test_what_a_refusal_says(text: str, wording: Wording) -> None:
    error = error_of(Output(returncode=1, stderr=text))
    assert type(error) is ConfigError
    wording(error)
