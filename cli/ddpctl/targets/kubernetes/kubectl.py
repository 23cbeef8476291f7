"""The command lines of kubectl, explanations of its errors, and the choice of cluster, namespace and workload."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ddpctl.command import NOT_FOUND, TIMED_OUT, Command, Output, Verb
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.targets.kubernetes.cluster_runtime import check_runtime
from ddpctl.targets.kubernetes.manifests import WORKLOADS, Workload
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.text import one_line, quote

TIMEOUT_S = 60.0
REQUEST_TIMEOUT = "--request-timeout=30s"
# A pattern of a message → the sentence for it, in which {m[1]} is the pattern's first group.
Explanations = Mapping[str, str | Callable[[re.Match[str]], str]]
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
        words = ("create", *judged, "--validate=strict", "-o", output, "-f", "-")
        return self.run(*words, stdin=text, secret=secret, placeholder="<uid>", starts=not dry_run)

    def get(self, what: str, *rest: str) -> Command:
        """Return the command that prints objects as JSON, or prints nothing if there are no such objects."""
        return self.run("get", what, *rest, "--ignore-not-found", "-o", "json")

    def events_of(self, name: str) -> Command:
        """Return the command that prints the warning events of an object."""
        return self.get("events", "--field-selector", f"type=Warning,involvedObject.name={name}")


def items(output: Output) -> list[dict[str, Any]]:
    """Return the objects in the output of ``get``. The output may be a list of objects, one object or empty."""
    if not output.stdout.strip():
        return []
    answer: dict[str, Any] = json.loads(output.stdout)
    return list(answer.get("items", [])) if answer["kind"].endswith("List") else [answer]


# Explanations of errors. The patterns match the messages of kubectl 1.32 and Kubernetes 1.32
# (tests/data/kubernetes/bad).


_SLOW = "the cluster does not answer in time: check that it is up, and check your VPN"
# Errors for which the cluster cannot be reached.
_AWAY: Explanations = {
    r"failed calling webhook \"([^\"]+)\"":
        "the operator's webhook {m[1]} does not answer: the operator is down; ask the administrator",
    r"(localhost:8080)\S*\"?: dial tcp|The connection to the server (localhost:8080)":
        "kubectl has no cluster configured: set KUBECONFIG, or run kubectl config use-context",
    r"the server has asked for the client to provide credentials|Unauthorized":
        "the cluster does not accept your credentials (401): log in to it again",
    r"x509: (.*?)(?:;|$)": "the cluster's certificate is not trusted ({m[1]}): check KUBECONFIG's authority",
    r"The connection to the server (\S+) was refused":
        "the cluster does not answer at {m[1]} (connection refused): check that it is up, and check your VPN",
    r"context deadline exceeded|Client\.Timeout": _SLOW,
}  # fmt: skip

# Errors for which the cluster refuses the request, or kubectl refuses its arguments.
_REFUSED: Explanations = {
    r"context \"?([^\"\n]*?)\"? does not exist|context was not found for specified context: (\S+)"
    r"|cannot locate context \"?([^\"\s]+)":
        lambda m: f"kubectl has no context '{m[1] or m[2] or m[3]}': kubectl config get-contexts lists all",
    r"admission webhook \"([^\"]+)\" denied the request: (.*)": "the operator refuses the job ({m[1]}): {m[2]}",
    r"violates PodSecurity .*init-pytorch":
        "the namespace's Pod Security forbids the container init-pytorch, which the operator adds to a Master: set "
        "master: false",
    r"violates PodSecurity \"([^\"]+)\": (.*)":
        "the namespace admits only pods of Pod Security {m[1]}: {m[2]}. Set the target's profile to 'restricted', and "
        "do not mount paths of the machines; or use another namespace",
    r"cannot (\w+) resource \"secrets\" in API group \"\"(?: in the namespace \"([^\"]+)\")?":
        lambda m: f"you may not {m[1]} secrets{f' in the namespace {m[2]}' if m[2] else ''}: for jobs with secrets, "
        "you need the Role in k8s/rbac-secrets.yaml; without it, name an existing Secret with pod",
    r"cannot (\w+) resource \"([^\"]+)\" .*at the cluster scope":
        "you may not {m[1]} {m[2]}: ask the administrator for a ClusterRole that allows it",
    r"cannot (\w+) resource \"([^\"]+)\" in API group \"([^\"]*)\"(?: in the namespace \"([^\"]+)\")?":
        lambda m: f"you may not {m[1]} {m[2]}{f' in the namespace {m[4]}' if m[4] else ''}: ddpctl needs the Role in "
        "k8s/rbac.yaml",
    r"namespaces \"([^\"]+)\" not found": "there is no namespace {m[1]}: kubectl create namespace {m[1]}",
    r"no matches for kind \"(\w+)\" in version \"([^\"]+)\"|could not find the requested resource \(post (\S+?)\)"
    r"|doesn't have a resource type \"(\w+)\"":
        lambda m: f"the cluster does not serve {m[1] or m[3] or m[4]}: either no operator for it is installed (use "
        "--kind job), or the API server has just started (try again)",
    r"\"([^\"]+)\" already exists": "'{m[1]}' already exists in the namespace: choose another --name",
    r"(?:The )?(\w+) \"([^\"]+)\" is invalid:\s*(?:\* )?(.*)": "the cluster refuses it: {m[3]}",
    r"Error from server \((\w+)\): (.*)": "the cluster refuses it ({m[1]}): {m[2]}",
}  # fmt: skip


def explain(text: str, explanations: Explanations) -> str | None:
    """Return the first explanation whose pattern matches the text, or None if no pattern matches."""
    for pattern, sentence in explanations.items():
        if match := re.search(pattern, text, re.M):
            return sentence(match) if callable(sentence) else sentence.format(m=match)
    return None


def error_of(output: Output) -> DdpctlError:
    """Return the error of a failed command.

    The error is a ConfigError if the cluster or kubectl has refused the request. Otherwise it is an UnavailableError.
    """
    if output.returncode == NOT_FOUND:
        return UnavailableError("kubectl is not installed: install it (https://kubernetes.io/docs/tasks/tools)")
    if output.returncode == TIMED_OUT:
        return UnavailableError(_SLOW)
    text = "\n".join(line for line in output.stderr.splitlines() if not line.startswith("Warning: "))
    for explanations, kind in ((_AWAY, UnavailableError), (_REFUSED, ConfigError)):
        if sentence := explain(text, explanations):
            return kind(one_line(sentence).strip())
    lines = text.strip().splitlines()
    return UnavailableError(one_line(f"kubectl failed: {lines[-1] if lines else f'exit code {output.returncode}'}"))


def check(*outputs: Output) -> None:
    """Raise the error of the first command that failed. Do nothing if all commands succeeded."""
    for output in outputs:
        if output.returncode:
            raise error_of(output)


def find_cluster(options: KubernetesOptions) -> Verb[Kubectl]:
    """Return kubectl with an explicit context and namespace. Raises ConfigError, UnavailableError."""
    asked = Kubectl(context=options.context, namespace=options.namespace)
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
        return asked  # inside a pod there is no configuration
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
            raise ConfigError(
                f"the cluster does not serve {workload.kind}: no operator for it is installed; use --kind job"
            )
        unknown = f"it is not known whether the cluster serves {workload.kind}, because {error_of(answer)}"
        return workload, "chosen with 'workload' or --kind", unknown if answer.returncode else ""
    asked = [WORKLOADS["pytorchjob"], WORKLOADS["trainjob"]]
    answers = yield tuple(kubectl.raw(workload.api) for workload in asked)
    present = [(workload, answer) for workload, answer in zip(asked, answers, strict=True) if not is_absent(answer)]
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
    absent = "NotFound|could not find the requested resource|the server doesn't have a resource type"
    return answer.returncode != 0 and re.search(absent, answer.stderr) is not None


def keeps_secrets(answer: Output) -> bool:
    """Return whether a command failed only because the user has no right to access Secrets."""
    lines = [line for line in answer.stderr.splitlines() if line and not line.startswith("Warning: ")]
    return bool(lines) and all('resource "secrets"' in line for line in lines)
