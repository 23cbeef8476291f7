"""The command lines of kubectl, explanations of its errors, and the choice of cluster, namespace and workload."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpctl.command import NOT_FOUND, TIMED_OUT, Command, Output, Verb
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.targets.kubernetes.manifests import WORKLOADS, Workload
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod_patch import check_runtime
from ddpctl.text import one_line, quote

TIMEOUT_S = 60.0
REQUEST_TIMEOUT = "--request-timeout=30s"
_SCHEMA = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
_SINCE_2_2 = "runtimePatches"  # 2.0 had podSpecOverrides, 2.1 podTemplateOverrides


@dataclass(frozen=True, kw_only=True)
class Kubectl:
    """Builds command lines of kubectl for one namespace of one cluster."""

    context: str | None = None  # None: kubectl's current context
    namespace: str | None = None  # None: the context's namespace

    @property
    def argv(self) -> tuple[str, ...]:
        """The beginning of every command line: kubectl with its context and namespace."""
        context = ("--context", self.context) if self.context else ()
        return ("kubectl", *context, *(("--namespace", self.namespace) if self.namespace else ()))

    def run(self, *arguments: str, timeout_s: float | None = TIMEOUT_S, **rest: Any) -> Command:
        """Return a command that queries or changes the cluster."""
        return Command(argv=(*self.argv, REQUEST_TIMEOUT, *arguments), timeout_s=timeout_s, **rest)

    def raw(self, path: str) -> Command:
        """Return the command that checks whether the cluster serves the API at ``path``."""
        return self.run("get", "--raw", path, probe=True)

    def create(self, text: str, *, dry_run: bool = False, secret: bool = False, output: str = "name") -> Command:
        """Return the command that creates the objects in a YAML text. ``dry_run``: the cluster only checks them."""
        judged = ("--dry-run=server",) if dry_run else ()
        arguments = ("create", *judged, "--validate=strict", "-o", output, "-f", "-")
        return self.run(*arguments, stdin=text, secret=secret, placeholder="<uid>", starts=not dry_run)

    def get(self, resource: str, *rest: str) -> Command:
        """Return the command that prints objects as JSON, or prints nothing if there are no such objects."""
        return self.run("get", resource, *rest, "--ignore-not-found", "-o", "json")

    def events_of(self, name: str) -> Command:
        """Return the command that prints the warning events of an object."""
        return self.get("events", "--field-selector", f"type=Warning,involvedObject.name={name}")


def items(output: Output) -> list[dict[str, Any]]:
    """Return the objects in the output of ``get``. The output may be a list of objects, one object or empty."""
    if not output.stdout.strip():
        return []
    answer: dict[str, Any] = json.loads(output.stdout)
    return list(answer.get("items", [])) if answer["kind"].endswith("List") else [answer]


# Answers by which the cluster or kubectl refuses a request. After any other error, the request may have had an effect.
# The words in parentheses are the API's reasons (kubectl 1.32 and Kubernetes 1.32, tests/data/kubernetes/bad).
_REFUSED = re.compile(
    r"^Error from server \((?!InternalError|ServiceUnavailable|(Server)?Timeout|TooManyRequests|Unauthorized)"
    r"|denied the request: |^The \w+ \".*\" is invalid:|^error: context .*(does not exist|not found)"
    r"|context was not found for specified context|cannot locate context"
    r"|no matches for kind |doesn't have a resource type ",
    re.MULTILINE,
)
_SLOW = "check that the cluster is up, and check your VPN"
_NO_OPERATOR = "no operator for it is installed (use --kind job), or the API server has just started (try again)"
# A part of kubectl's message → what to do about it. The first part that the message has counts.
HINTS: Mapping[str, str] = {
    "failed calling webhook": "the operator is down: ask the administrator",
    "localhost:8080": "set KUBECONFIG, or run kubectl config use-context",
    "provide credentials": "log in to the cluster again (401)",
    "Unauthorized": "log in to the cluster again (401)",
    "x509: ": "check KUBECONFIG's authority",
    "init-pytorch": "the operator adds the container init-pytorch to a Master: set master: false",
    "violates PodSecurity":
        "set the target's profile to 'restricted', and mount no paths of the machines; or use another namespace",
    'resource "secrets"':
        "jobs with secrets need the Role in k8s/rbac-secrets.yaml; without it, name an existing Secret with pod",
    "at the cluster scope": "ask the administrator for a ClusterRole that allows it",
    "in API group": "ddpctl needs the Role in k8s/rbac.yaml",
    'namespaces "': "make it with kubectl create namespace",
    "no matches for kind": _NO_OPERATOR,
    "could not find the requested resource": _NO_OPERATOR,
    "doesn't have a resource type": _NO_OPERATOR,
    "already exists": "choose another --name",
    "was refused": _SLOW, "deadline exceeded": _SLOW, "Client.Timeout": _SLOW,
}  # fmt: skip


def hint_of(text: str, hints: Mapping[str, str]) -> str:
    """Return what to do about a message of the cluster, or an empty text."""
    return next((hint for part, hint in hints.items() if part in text), "")


def error_of(output: Output) -> DdpctlError:
    """Return the error of a failed command, with kubectl's own message.

    The error is a ConfigError if the cluster or kubectl has refused the request. Otherwise it is an UnavailableError.
    """
    if output.returncode == NOT_FOUND:
        return UnavailableError("kubectl is not installed: install it (https://kubernetes.io/docs/tasks/tools)")
    if output.returncode == TIMED_OUT:
        return UnavailableError("the cluster does not answer in time", hint=_SLOW)
    lines = output.stderr.strip().splitlines() or [f"exit code {output.returncode}"]
    # kubectl's log of its retries, such as E1120 09:11:03.246911, comes before its message.
    message = [line for line in lines if not re.match(r"Warning: |[EIW]\d{4} ", line)] or lines[-1:]
    text = " ".join(message)
    kind = ConfigError if _REFUSED.search("\n".join(message)) else UnavailableError
    return kind(f"kubectl failed: {one_line(text)}", hint=hint_of(text, HINTS))


def check(*outputs: Output) -> None:
    """Raise the error of the first command that failed. Do nothing if all commands succeeded."""
    for output in outputs:
        if output.returncode:
            raise error_of(output)


def find_cluster(options: KubernetesOptions) -> Verb[Kubectl]:
    """Return kubectl with an explicit context and namespace. Raises ConfigError, UnavailableError."""
    requested = Kubectl(context=options.context, namespace=options.namespace)
    configuration = ("config", "view", "--minify", "-o", "json")
    (view,) = yield (Command(argv=(*Kubectl(context=options.context).argv, *configuration), probe=True),)
    if view.returncode == NOT_FOUND or (view.returncode and options.context):
        error = error_of(view)
        if isinstance(error, ConfigError):  # the context does not exist
            (listed,) = yield (Command(argv=("kubectl", "config", "get-contexts", "-o", "name"), probe=True),)
            known = ", ".join(listed.stdout.split()) if listed.returncode == 0 else ""
            raise ConfigError(f"context: kubectl has no context {quote(options.context)}; known: {known or 'none'}")
        raise error
    try:
        config = json.loads(view.stdout) if view.returncode == 0 else {}
        context = config["contexts"][0]
    except (ValueError, KeyError, IndexError, TypeError):
        return requested  # inside a pod there is no configuration
    namespace = options.namespace or context["context"].get("namespace", "default")
    return Kubectl(context=options.context or config.get("current-context") or context["name"], namespace=namespace)


def choose_workload(kubectl: Kubectl, options: KubernetesOptions) -> Verb[tuple[Workload, str, str]]:
    """Return the kind of workload to use, the reason for it, and a note for the user, which may be empty.

    If the options do not name a kind, choose the first kind that the cluster serves: PyTorchJob, TrainJob or Job.
    Raises ConfigError or UnavailableError.
    """
    if options.workload != "auto":
        workload = WORKLOADS[options.workload]
        (answer,) = yield (kubectl.raw(workload.api),)
        if is_absent(answer):
            raise ConfigError(f"the cluster does not serve {workload.kind}", hint=_NO_OPERATOR)
        unknown = f"it is not known whether the cluster serves {workload.kind}, because {error_of(answer)}"
        return workload, "chosen with 'workload' or --kind", unknown if answer.returncode else ""
    operators = [WORKLOADS["pytorchjob"], WORKLOADS["trainjob"]]
    answers = yield tuple(kubectl.raw(workload.api) for workload in operators)
    present = [(workload, answer) for workload, answer in zip(operators, answers, strict=True) if not is_absent(answer)]
    check(*(answer for _, answer in present))
    served = {
        workload.word
        for workload, answer in present
        for resource in json.loads(answer.stdout).get("resources", ())
        if resource["name"] == workload.resource.partition(".")[0]
    }
    if "pytorchjob" in served:
        return WORKLOADS["pytorchjob"], "the cluster has Kubeflow's training-operator", ""
    if options.master:
        raise ConfigError("master: true needs a PyTorchJob, which this cluster does not serve: set master: false")
    if "trainjob" not in served:
        return WORKLOADS["job"], "the cluster has no Kubeflow operator", ""
    (schema,) = yield (kubectl.raw(_SCHEMA),)
    if schema.returncode == 0 and _SINCE_2_2 not in schema.stdout:
        return WORKLOADS["job"], "the cluster's Kubeflow Trainer is older than 2.2", ""
    return WORKLOADS["trainjob"], "the cluster has Kubeflow Trainer", ""


def read_runtime(kubectl: Kubectl, name: str) -> Verb[Mapping[str, Any]]:
    """Return the spec of the runtime that the option ``runtime`` names. Raises ConfigError or UnavailableError."""
    kind, short = f"ClusterTrainingRuntime/{name}".split("/")[-2:]
    resource = f"{kind.lower()}s.trainer.kubeflow.org"
    (answer,) = yield (replace(kubectl.get(resource, short), probe=True),)
    if answer.returncode:
        error = error_of(answer)
        raise type(error)(f"runtime: a launch, also a dry run, reads {name} from the cluster: {error}")
    for runtime in items(answer):
        check_runtime(name, runtime["spec"])
        return dict(runtime["spec"])
    (listed,) = yield (kubectl.run("get", resource, "-o=jsonpath={.items[*].metadata.name}", probe=True),)
    known = f"known: {', '.join(listed.stdout.split()) or 'none'}" if listed.returncode == 0 else error_of(listed)
    raise ConfigError(f"runtime: the cluster has no {kind} {quote(short)}; {known}")


def kubectl_of(handle: Mapping[str, Any]) -> Kubectl:
    """Return kubectl for the cluster of a run. ``handle`` is the handle in the run's record."""
    return Kubectl(context=handle.get("context"), namespace=handle.get("namespace"))


def workload_of(handle: Mapping[str, Any]) -> Workload:
    """Return the workload of a run. ``handle`` is the handle in the run's record."""
    return WORKLOADS[handle["workload"]]


def is_absent(answer: Output) -> bool:
    """Return whether a command failed because the cluster has no such object or API."""
    absent = ("NotFound", "could not find the requested resource", "the server doesn't have a resource type")
    return answer.returncode != 0 and any(part in answer.stderr for part in absent)


def keeps_secrets(answer: Output) -> bool:
    """Return whether a command failed only because the user has no right to access Secrets."""
    lines = [line for line in answer.stderr.splitlines() if line and not line.startswith("Warning: ")]
    return bool(lines) and all('resource "secrets"' in line for line in lines)
