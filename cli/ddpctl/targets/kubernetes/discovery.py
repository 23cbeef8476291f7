"""Which cluster, which namespace, and which workload runs the job there. Verbs that others go through; pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import ConfigError
from ddpctl.targets.kubernetes.answers import error_of
from ddpctl.targets.kubernetes.kubectl import Kubectl
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.workloads import WORKLOADS, Workload
from ddpctl.words import quote

_SCHEMA = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
_SINCE_2_2 = "runtimePatches"  # 2.0 had podSpecOverrides, 2.1 podTemplateOverrides


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs the job, and why."""

    workload: Workload
    why: str


def find_cluster(options: KubernetesOptions) -> Verb[Kubectl]:
    """kubectl, with its context and its namespace written out."""
    asked = Kubectl(context=options.context, namespace=options.namespace)
    (view,) = yield (asked.view(),)
    if view.returncode == 127 or (view.returncode and options.context):
        error = error_of(view)
        if isinstance(error, ConfigError):  # the context is not there
            (listed,) = yield (Command(argv=("kubectl", "config", "get-contexts", "-o", "name"), probe=True),)
            known = ", ".join(listed.stdout.split()) if listed.returncode == 0 else ""
            raise ConfigError(f"context: kubectl has no {quote(options.context)}; there are: {known or 'none'}")
        raise error
    return asked.chosen(view)


def choose(kubectl: Kubectl, options: KubernetesOptions) -> Verb[Choice]:
    """The workload of the options, or the first that the cluster serves. Raises ConfigError, UnavailableError."""
    if options.workload != "auto":
        return (yield from _as_said(kubectl, WORKLOADS[options.workload]))
    asked = [WORKLOADS["pytorchjob"], WORKLOADS["trainjob"]]
    answers = yield tuple(kubectl.raw(workload.api) for workload in asked)
    served = {workload.word: _serves(workload, answer) for workload, answer in zip(asked, answers, strict=True)}
    if served["pytorchjob"]:
        return Choice(workload=WORKLOADS["pytorchjob"], why="the cluster has Kubeflow's training-operator")
    if options.master:
        raise ConfigError("master: true needs a PyTorchJob, which this cluster does not serve: master: false")
    if not served["trainjob"]:
        return Choice(workload=WORKLOADS["job"], why="the cluster has no operator of Kubeflow's")
    (schema,) = yield (kubectl.raw(_SCHEMA),)
    if schema.returncode == 0 and _SINCE_2_2 not in schema.stdout:
        return Choice(workload=WORKLOADS["job"], why="the cluster's Kubeflow Trainer is older than 2.2")
    return Choice(workload=WORKLOADS["trainjob"], why="the cluster has Kubeflow Trainer")


def _as_said(kubectl: Kubectl, workload: Workload) -> Verb[Choice]:
    """The workload that was named; a cluster that cannot be asked now refuses a launch, and a dry run says it."""
    (answer,) = yield (kubectl.raw(workload.api),)
    if _is_absent(answer):
        raise ConfigError(f"the cluster has no {workload.kind}: its operator is not installed; --kind job needs none")
    why = "as you said" if answer.returncode == 0 else f"as you said; the cluster was not asked: {error_of(answer)}"
    return Choice(workload=workload, why=why)


def workload_of(handle: Mapping[str, str]) -> Workload:
    """The workload of a run that was started."""
    return WORKLOADS[handle["workload"]]


def _serves(workload: Workload, answer: Output) -> bool:
    """Whether the API group has the resource. Raises what the cluster says where it cannot be asked."""
    if _is_absent(answer):
        return False
    if answer.returncode:
        raise error_of(answer)
    plural = workload.resource.partition(".")[0]
    return any(one["name"] == plural for one in json.loads(answer.stdout).get("resources", ()))


def _is_absent(answer: Output) -> bool:
    """Whether the cluster says that it has no such API."""
    absent = "NotFound" in answer.stderr or "could not find the requested resource" in answer.stderr
    return answer.returncode != 0 and absent
