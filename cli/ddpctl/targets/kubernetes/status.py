"""How a run fares, from its job's conditions and its pods. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpctl.run import NodeReport, Run, RunStatus, State
from ddpctl.targets.kubernetes.reasons import PodReport, report, why_no_pod
from ddpctl.targets.kubernetes.workloads import Workload
from ddpctl.words import one_line
from ddpwire.exits import Exit

Object = Mapping[str, Any]


def conditions(job: Object) -> dict[str, Object]:
    """The conditions that hold, by type."""
    found = job.get("status", {}).get("conditions", ())
    return {condition["type"]: condition for condition in found if condition["status"] == "True"}


def has_ended(job: Object | None) -> bool:
    """Whether nothing more will come of it."""
    return job is None or bool({"Succeeded", "Complete", "Failed"} & conditions(job).keys())


def newest_pods(workload: Workload, pods: Sequence[Object], *, master: bool) -> dict[int, Object]:
    """The pod of each node: the newest, where one was replaced."""
    found: dict[int, Object] = {}
    for pod in sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"]):
        found[workload.node(pod["metadata"], master)] = pod
    return dict(sorted(found.items()))


def unexplained(workload: Workload, job: Object | None, pods: Sequence[Object], nodes: int) -> tuple[str, ...]:
    """The objects whose events are worth a look: a job that lacks pods, a pod that does not say what it waits for."""
    names = [pod["metadata"]["name"] for pod in pods if report(pod, workload.container).unexplained]
    if job is not None and not has_ended(job) and len(pods) < nodes and "Suspended" not in conditions(job):
        name = job["metadata"]["name"]
        names += [name, f"{name}-node-0"] if workload.word == "trainjob" else [name]
    return tuple(names)


def fold(
    run: Run, workload: Workload, job: Object | None, pods: Sequence[Object], events: Sequence[Object], *, young: bool
) -> RunStatus:
    """One run's status."""
    master = bool(run.options.get("master"))
    by_pod = {
        node: report(pod, workload.container, [one for one in events if _is_of(one, pod)])
        for node, pod in newest_pods(workload, pods, master=master).items()
    }
    nodes = tuple(_node(node, by_pod.get(node)) for node in range(run.job.max_nodes))

    def say(state: State, message: str, code: int | None = None, *, remains: bool = False) -> RunStatus:
        told = RunStatus(run=run.name, state=state, message=one_line(message), code=code, nodes=nodes, remains=remains)
        if told.ended:  # a pod that is still being cleaned away does not go on
            return replace(told, nodes=tuple(replace(node, alive=False) for node in nodes))
        return told

    if job is None:
        if young:
            return say("starting", "the cluster has not seen it yet")
        return say(
            "stopped",
            f"the {workload.kind} is not in the cluster any more: it was stopped, deleted, or its time (keep) "
            "was over, its pods and logs with it",
            Exit.SAVED_TERM,
        )
    holds = conditions(job)
    if "deletionTimestamp" in job["metadata"]:
        return say("stopping", f"the {workload.kind} is being deleted; {_counted(by_pod, run)}")
    if "Succeeded" in holds or "Complete" in holds:
        return say("succeeded", f"the {workload.kind} has succeeded", Exit.OK, remains=True)
    if "Failed" in holds:
        return say("failed", _why_failed(workload, holds["Failed"], by_pod), _code(by_pod), remains=True)
    if "Suspended" in holds:
        return say("suspended", f"suspended: it has no pods, and keeps its checkpoints; ddpctl resume {run.name}")
    return say(_state(by_pod, run.job.max_nodes), _why(workload, job, by_pod, events, run))


def _node(node: int, pod: PodReport | None) -> NodeReport:
    alive = pod is not None and pod.phase in ("waiting", "running", "stopping")
    note = f"{pod.name}: {pod.words}" if pod else "no pod"
    return NodeReport(node=node, alive=alive, state=None, outcome=None, note=note)


def _is_of(event: Object, pod: Object) -> bool:
    return bool(event["involvedObject"]["name"] == pod["metadata"]["name"])


def _counted(pods: Mapping[int, PodReport], run: Run) -> str:
    running = sum(pod.phase == "running" for pod in pods.values())
    return f"{running} of {run.job.max_nodes} pod{'s' * (run.job.max_nodes != 1)} running"


def _state(pods: Mapping[int, PodReport], nodes: int) -> State:
    running = sum(pod.phase == "running" for pod in pods.values())
    return "training" if running == nodes else "rendezvous" if running else "starting"


def _why(workload: Workload, job: Object, pods: Mapping[int, PodReport], events: Sequence[Object], run: Run) -> str:
    """The worst that there is to say of a job that goes on."""
    for pod in pods.values():
        if pod.ill:
            return f"{pod.name}: {pod.words}"
    about_job = [one for one in events if one["involvedObject"]["name"].startswith(job["metadata"]["name"])]
    if len(pods) < run.job.max_nodes and (words := why_no_pod(about_job)):
        return f"{_counted(pods, run)}: {words}"
    restarts = sum(pod.restarts for pod in pods.values())
    again = f", {restarts} restart{'s' * (restarts != 1)} so far" if restarts else ""
    if any(pod.phase == "stopping" for pod in pods.values()):
        return f"{_counted(pods, run)}{again}: a pod is being replaced"
    if not pods and "Restarting" in conditions(job):
        return f"the {workload.kind} is making new pods for those that failed"
    if not pods:
        return f"the {workload.kind} has no pods yet"
    return f"{_counted(pods, run)}{again}"


def _why_failed(workload: Workload, condition: Object, pods: Mapping[int, PodReport]) -> str:
    said = condition.get("message", "")
    if "backoff limit" in said:
        said = "its pods failed more often than backoffLimit allows, and were deleted with their logs"
    elif "because" in said:
        said = "a pod failed"
    for pod in sorted(pods.values(), key=lambda pod: pod.code in (None, 0)):
        if pod.phase == "failed" or pod.code:
            return f"{said}: {pod.name}: {pod.words}"
    return said or f"the {workload.kind} has failed"


def _code(pods: Mapping[int, PodReport]) -> int:
    codes = [pod.code for pod in pods.values() if pod.code]
    return codes[0] if codes else Exit.SCRIPT
