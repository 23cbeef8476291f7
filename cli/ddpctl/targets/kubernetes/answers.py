"""What kubectl says when a cluster cannot be asked or refuses, as one sentence with what to do. Pure.

The patterns are those of kubectl 1.32 and Kubernetes 1.32 (tests/data/kubernetes/bad).
"""

import re
from collections.abc import Callable

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.words import one_line

_Make = Callable[[re.Match[str]], str]

# The cluster cannot be asked at all.
_AWAY: tuple[tuple[str, _Make], ...] = (
    (
        r"failed calling webhook \"([^\"]+)\"",
        lambda m: f"the operator's own check {m[1]} does not answer: the operator is down, ask who runs the cluster",
    ),
    (r"^kubectl: not found", lambda _: "kubectl is not here: install it (https://kubernetes.io/docs/tasks/tools)"),
    (r"error loading config file \"([^\"]+)\": (.*)", lambda m: f"{m[1]} is no configuration of kubectl: {m[2]}"),
    (r"stat (\S+): no such file", lambda m: f"{m[1]}: there is no such configuration of kubectl"),
    (
        r"(localhost:8080)\S*\"?: dial tcp|The connection to the server (localhost:8080)",
        lambda _: "kubectl knows no cluster: set KUBECONFIG, or kubectl config use-context",
    ),
    (
        r"the server has asked for the client to provide credentials|Unauthorized",
        lambda _: "the cluster does not know you (401): sign in again, as your cluster wants it",
    ),
    (
        r"x509: (.*?)(?:;|$)",
        lambda m: f"the cluster's certificate is not trusted ({m[1]}): check KUBECONFIG's authority",
    ),
    (
        r"lookup (\S+?)(?: on \S+)?: no such host",
        lambda m: f"the cluster's name {m[1]} is not known here: is a VPN missing?",
    ),
    (
        r"The connection to the server (\S+) was refused",
        lambda m: f"the cluster does not answer at {m[1]} (connection refused): is it up, is a VPN missing?",
    ),
    (
        r"dial tcp (\S+?): (?:connect: )?(connection refused|no route to host|i/o timeout)",
        lambda m: f"the cluster does not answer at {m[1]} ({m[2]}): is it up, is a VPN missing?",
    ),
    (
        r"no answer within|context deadline exceeded|Client\.Timeout",
        lambda _: "the cluster does not answer in time: is it up, is a VPN missing?",
    ),
)
# It was asked, and said no; or kubectl did, to what it was told.
_REFUSED: tuple[tuple[str, _Make], ...] = (
    (
        r"context \"?([^\"\n]*?)\"? does not exist|context was not found for specified context: (\S+)"
        r"|cannot locate context \"?([^\"\s]+)",
        lambda m: f"kubectl has no context {m[1] or m[2] or m[3]}: kubectl config get-contexts lists them",
    ),
    (
        r"admission webhook \"([^\"]+)\" denied the request: (.*)",
        lambda m: f"the operator refuses it ({m[1]}): {m[2]}",
    ),
    (
        r"violates PodSecurity .*init-pytorch",
        lambda _: (
            "the namespace's Pod Security forbids the container init-pytorch, which the operator puts beside a Master: "
            "master: false has none"
        ),
    ),
    (
        r"violates PodSecurity \"([^\"]+)\": (.*)",
        lambda m: (
            f"the namespace admits only pods of Pod Security {m[1]}: {m[2]}: profile restricted, no path of a "
            "machine among the mounts, or another namespace"
        ),
    ),
    (
        r"exceeded quota: (\S+), requested: (\S+)=(\S+), used: \S+=(\S+), limited: \S+=(\S+)",
        lambda m: (
            f"the namespace's quota {m[1]} is used up: {m[2]}: {m[3]} asked for, {m[4]} used, {m[5]} allowed: "
            "ask for less, or wait for other jobs"
        ),
    ),
    (
        r"cannot (\w+) resource \"([^\"]+)\" in API group \"([^\"]*)\"(?: in the namespace \"([^\"]+)\")?",
        lambda m: (
            f"you may not {m[1]} {m[2]}{f' in the namespace {m[4]}' if m[4] else ''}: k8s/rbac.yaml is the Role "
            "that ddpctl needs"
        ),
    ),
    (r"namespaces \"([^\"]+)\" not found", lambda m: f"there is no namespace {m[1]}: kubectl create namespace {m[1]}"),
    (
        r"no matches for kind \"(\w+)\" in version \"([^\"]+)\"|could not find the requested resource \(post (\S+?)\)"
        r"|doesn't have a resource type \"(\w+)\"",
        lambda m: f"the cluster has no {m[1] or m[3] or m[4]}: its operator is not installed; --kind job needs none",
    ),
    (r"\"([^\"]+)\" already exists", lambda m: f"{m[1]} is in the namespace already: choose another --name"),
    (
        r"no PriorityClass with name (\S+) was found",
        lambda m: f"there is no PriorityClass {m[1]}: kubectl get priorityclasses lists them",
    ),
    (r"strict decoding error: (.*)", lambda m: f"the cluster's version does not know it: {m[1]}"),
    (r"(?:The )?(\w+) \"([^\"]+)\" is invalid:\s*(?:\* )?(.*)", lambda m: f"the cluster refuses it: {m[3]}"),
    (r"\(NotFound\): (\S+) \"([^\"]+)\" not found", lambda m: f"there is no {m[2]} among the cluster's {m[1]}"),
    (r"Error from server \((\w+)\): (.*)", lambda m: f"the cluster refuses it ({m[1]}): {m[2]}"),
)


def error_of(output: Output) -> DdpctlError:
    """A command that failed, as an error: of the cluster that cannot be asked, or of what it was asked."""
    text = "\n".join(line for line in output.stderr.splitlines() if not line.startswith("Warning: "))
    for patterns, kind in ((_AWAY, UnavailableError), (_REFUSED, ConfigError)):
        for pattern, make in patterns:
            if match := re.search(pattern, text, re.M):
                return kind(one_line(make(match)).strip())
    lines = text.strip().splitlines()
    return UnavailableError(one_line(f"kubectl failed: {lines[-1] if lines else f'exit code {output.returncode}'}"))


def check(*outputs: Output) -> None:
    """Raise what the first failed command says."""
    for output in outputs:
        if output.returncode:
            raise error_of(output)
