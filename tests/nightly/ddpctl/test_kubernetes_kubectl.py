"""States of pods that pass."""

import pytest
from tests.unit.ddpctl.test_kubernetes_kubectl import RECORDED, states, status_of

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.targets.kubernetes.kubectl import error_of


def test_a_pod_that_outlives_its_grace_names_its_machine() -> None:
    status = status_of("terminating", now=RECORDED + 3600)
    assert status.state == "rendezvous"
    assert all(fact in status.message for fact in ("terminating-worker-1", "machine node-1", "--replace-lost"))


def test_a_job_that_is_being_suspended_does_not_replace_its_pods() -> None:
    job, *_ = states()["terminating"]
    job["spec"]["runPolicy"]["suspend"] = True
    status = status_of("terminating", job=job)
    assert (status.state, "replaced" in status.message) == ("stopping", False)


PULLING = 'failed to pull and unpack image "reg:5000/t:1": failed to resolve reference "reg:5000/t:1": '


@pytest.mark.parametrize(
    ("cause", "fact"),
    [
        ('failed to do request: Head "https://reg:5000/v2/t": dial tcp 10.0.0.1:5000: i/o timeout',
         "dial tcp 10.0.0.1:5000: i/o timeout"),
        ("unexpected status from HEAD request: 500 Internal Server Error",
         "unexpected status from HEAD request: 500 Internal Server Error"),
        ("reg:5000/t:1: not found", "not found"),
    ],
)  # fmt: skip
def test_why_an_image_cannot_be_pulled_is_the_same_line_in_each_state_of_the_pull(cause: str, fact: str) -> None:
    """Whether the kubelet tries, waits, or (before 1.31) has the cause in an event alone."""
    _, pods, _ = states()["imagepullbackoff"]
    failed = {
        "reason": "Failed",
        "message": f'Failed to pull image "reg:5000/t:1": rpc error: code = Unknown desc = {PULLING}{cause}',
    }
    messages = set()
    for reason, message, events in (
        ("ErrImagePull", f"{PULLING}{cause}", []),
        ("ErrImagePull", f"rpc error: code = NotFound desc = {PULLING}{cause}", []),
        ("ImagePullBackOff", f'Back-off pulling image "reg:5000/t:1": ErrImagePull: {PULLING}{cause}', []),
        ("ImagePullBackOff", 'Back-off pulling image "reg:5000/t:1"', [failed]),
    ):
        for pod in pods:
            container = pod["status"]["containerStatuses"][0]
            container["state"], container["image"] = {"waiting": {"reason": reason, "message": message}}, "reg:5000/t:1"
        of_pod = [{**event, "involvedObject": {"name": pods[0]["metadata"]["name"]}} for event in events]
        messages.add(status_of("imagepullbackoff", pods=pods, events=of_pod).message)
    (message,) = messages
    assert "reg:5000/t:1" in message
    assert message.endswith(fact)


REFUSED = "The connection to the server {} was refused - did you specify the right host or port?\n"


QUOTA = (
    'Error from server (Forbidden): pods "x-worker-0" is forbidden: exceeded quota: team, '
    "requested: pods=1,requests.cpu=2, used: pods=4,requests.cpu=8, limited: pods=4,requests.cpu=8"
)


SECRETS = (
    'Error from server (Forbidden): error when creating "STDIN": secrets is forbidden: User "ann" cannot create '
    'resource "secrets" in API group "" in the namespace "ml"'
)


@pytest.mark.parametrize(
    ("kind", "stderr", "fact"),
    [
        (UnavailableError, REFUSED.format("10.0.0.1:6443"), "10.0.0.1:6443"),
        (UnavailableError, REFUSED.format("localhost:8080"), "KUBECONFIG"),
        (ConfigError, "error: cannot locate context prodd\n", "prodd"),
        (UnavailableError, "error: \x1b[31modd\n", "error: \\x1b[31modd"),
        (UnavailableError, "error: Post: context deadline exceeded - error from a previous attempt: not found", "VPN"),
        (UnavailableError, "", "exit code 1"),
        (ConfigError, QUOTA, "requested: pods=1,requests.cpu=2, used: pods=4,requests.cpu=8, limited: pods=4"),
        (ConfigError, SECRETS, "k8s/rbac-secrets.yaml"),
    ],
    ids=["refused", "no cluster", "no context", "unknown", "deadline", "nothing", "two quotas", "secrets"],
)
def test_an_error_that_was_not_recorded(kind: type[DdpctlError], stderr: str, fact: str) -> None:
    error = error_of(Output(returncode=1, stderr=stderr))
    assert type(error) is kind
    assert fact in str(error)
