"""Finds the status of a run from its job's conditions, its pods and their events, with a message for each state.

The states are those of Kubernetes 1.32 (recorded in tests/data/kubernetes/pods and events).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from signal import SIGSEGV
from typing import Any, Literal

from ddpctl.command import NOT_FOUND
from ddpctl.runs.run_status import NodeReport, RunStatus, State
from ddpctl.runs.run_store import Run
from ddpctl.targets.kubernetes.kubectl import HINTS, hint_of
from ddpctl.targets.kubernetes.manifests import KUEUE, RETRIED, SUSPENDED, Workload
from ddpctl.targets.kubernetes.options import holds
from ddpctl.text import cut, one_line
from ddpwire.exits import Exit
from ddpwire.run_files import Outcome, read_outcome

Object = Mapping[str, Any]
Phase = Literal["waiting", "running", "stopping", "succeeded", "failed"]
LONGEST = 240  # the maximum length of a message from the cluster
YOUNG_S = 10.0  # how long a launch may take between writing its record and creating its job
# The delay before the Job controller replaces a failed pod, and its maximum. It doubles with each failure of the node,
# also with evictions (pkg/controller/job/backoff_utils.go and job_controller.go of Kubernetes 1.29 to 1.34).
DELAY_S, MOST_DELAY_S = 10, 600
DELAYS = (
    f"Kubernetes delays a node's new pod by {DELAY_S} s, then twice as much after each failure, up to {MOST_DELAY_S} s"
)
_FAILURES = ("batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count")
OVERDUE_S = 60.0  # a pod that still exists so long after its grace period hangs, or its machine does not answer
# Meanings of exit codes
_EXITS = {**{int(code): code.meaning for code in Exit if code.meaning},
          NOT_FOUND: "its program is not in the image", 128 + SIGSEGV: "it crashed (SIGSEGV)"}  # fmt: skip
# A part of the scheduler's message → what to do about it
_UNSCHEDULABLE = {
    "Insufficient": "wait, or request less (CPU ranks: --device cpu)",
    "Too many": "wait, or request less",
    "node affinity/selector": "compare the nodeSelector in pod with kubectl get nodes --show-labels",
    "untolerated taint": "add the taint to tolerations",
}
_EVICTED = {
    "emptydir": "write less there, or mount a claim",
    "low on resource": "reserve what it needs with the job's memory",
}
# What the kubelet and the container runtime write before the cause
_PULLING = (
    r"^(?:(?:Back-off pulling|[Ff]ailed to pull(?: and unpack)?|failed to resolve reference|failed to do request:)"
    r'(?: image)? (?:Head |Get )?"[^"]*"(?:: |$)|ErrImagePull: |rpc error: code = \w+ desc = )+'
)


@dataclass(frozen=True, kw_only=True)
class PodReport:
    """The state of one pod."""

    name: str
    phase: Phase
    message: str  # about the state
    code: int | None = None  # the last exit code of its container
    restarts: int = 0
    ill: bool = False  # whether there is a problem that a user should know
    unexplained: bool = False  # whether only its events can explain the state
    outcome: Outcome | None = None  # that of its ddprun, if it has ended


def report(
    pod: Object, container: str, events: Sequence[Object] = (), now: float = 0.0, *, final: bool = False
) -> PodReport:
    """Return the state of a pod at the time ``now`` (in seconds since the epoch). ``final``: its job has ended."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    main: Object = next((item for item in status.get("containerStatuses", ()) if item["name"] == container), {})
    state, last = main.get("state", {}), main.get("lastState", {}).get("terminated")
    restarts = main.get("restartCount", 0)

    def result(phase: Phase, message: str, **rest: Any) -> PodReport:
        code = (state.get("terminated") or last or {}).get("exitCode")
        outcome, text = _outcome(state.get("terminated", {})), one_line(message)
        return PodReport(name=name, phase=phase, message=text, code=code, restarts=restarts, outcome=outcome, **rest)

    if status.get("reason") == "Evicted":
        cause = status.get("message", "")
        return result("failed", _with_hint(f"evicted: {_short(cause)}", cause.lower(), _EVICTED), ill=True)
    if "deletionTimestamp" in pod["metadata"]:
        return _ending(pod, state.get("terminated"), now, result)
    if "waiting" in state:
        reason = _waiting(state["waiting"], last, main, events)
        unexplained = not reason or state["waiting"].get("reason") == "ImagePullBackOff"  # old kubelets give no cause
        return result("waiting", reason or "its container is being created", ill=bool(reason), unexplained=unexplained)
    if "terminated" in state:
        ended = state["terminated"]
        if ended["exitCode"] == 0:
            return result("succeeded", "done")
        if final or status.get("phase") == "Failed" or pod.get("spec", {}).get("restartPolicy") == "Never":
            return result("failed", _ended(ended) + ("" if final else _delay(pod, ended, now)), ill=True)
        return result("waiting", f"about to start again: {_ended(ended)}", ill=True)
    if "running" in state:
        again = f", restarted {_times(restarts)}, the last time after: {_ended(last)}" if restarts and last else ""
        return result("running", f"running{again}")
    return _not_started(pod, result)


def _ending(pod: Object, ended: Object | None, now: float, result: Callable[..., PodReport]) -> PodReport:
    # The timestamp is not the time of the deletion, but the end of the pod's grace period.
    name, end = pod["metadata"]["name"], pod["metadata"]["deletionTimestamp"]
    if ended and ended["exitCode"]:
        return result("stopping", f"is being deleted after {_ended(ended)}{_delay(pod, ended, now)}", ill=True)
    if not is_lost(pod, now):
        return result("stopping", f"is ending, within {pod['metadata'].get('deletionGracePeriodSeconds', 30)} s")
    machine = pod.get("spec", {}).get("nodeName", "unknown")
    late = f"the pod has not ended, although its grace period ended at {end}: check machine {machine}"
    delete = f"kubectl delete pod {name} --force --grace-period=0 (launch --replace-lost does this)"
    text = f"{late}. If this machine is lost, delete the pod to have it replaced: {delete}"
    return result("stopping", text, ill=True)


def is_lost(pod: Object, now: float) -> bool:
    """Return whether a deleted pod still exists after it should have ended. This happens if its machine is lost."""
    if "deletionTimestamp" not in pod["metadata"]:
        return False
    reasons = {condition.get("reason") for condition in pod.get("status", {}).get("conditions", ())}
    limit_s = 0.0 if "DeletionByTaintManager" in reasons else OVERDUE_S  # its machine was away for lost_node seconds
    return now - datetime.fromisoformat(pod["metadata"]["deletionTimestamp"]).timestamp() >= limit_s


def _delay(pod: Object, ended: Object, now: float) -> str:
    """Return in how many seconds the Job controller replaces a failed pod.

    Return an empty text if that is unknown, or if the exit code ends the job.
    """
    notes = pod["metadata"].get("annotations", {})
    counts = [notes.get(name, "0") for name in _FAILURES]
    if _FAILURES[0] not in notes or not all(map(str.isdecimal, counts)) or ended["exitCode"] not in RETRIED:
        return ""
    delay_s = min(DELAY_S * 2 ** min(sum(map(int, counts)), 10), MOST_DELAY_S)
    left_s = datetime.fromisoformat(ended["finishedAt"]).timestamp() + delay_s - now
    return f"; Kubernetes replaces the pod in {left_s:.0f} s" if left_s > 0 else "; Kubernetes is replacing the pod"


def _not_started(pod: Object, result: Callable[..., PodReport]) -> PodReport:
    status = pod.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        done = status["phase"] == "Succeeded"
        return result("succeeded" if done else "failed", "done" if done else _short(status.get("message", "failed")))
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            if condition.get("reason") == "SchedulingGated":
                return result("waiting", "is waiting for its queue to admit it")
            reason = condition.get("message", "").partition(" preemption:")[0]
            text = _with_hint(f"no machine can run it: {_short(reason)}", reason, _UNSCHEDULABLE)
            return result("waiting", text, ill=True)
    return result("waiting", "is waiting for a machine")


def _waiting(waiting: Object, last: Object | None, container: Object, events: Sequence[Object]) -> str:
    """Return why a container waits, or an empty text if the reason is unknown."""
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    match reason:
        case "ErrImagePull" | "ImagePullBackOff" | "RegistryUnavailable":
            return f"the image {container.get('image', '')} cannot be pulled{_unpulled(message, events)}"
        case "CrashLoopBackOff":
            return f"fails again and again, {_times(container.get('restartCount', 0))} so far: {_ended(last or {})}"
        case "CreateContainerConfigError" | "RunContainerError" | "CreateContainerError" | "StartError":
            return f"the container cannot be started: {_short(message)}"
    for event in reversed(events):
        if event["reason"] in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedScheduling"):
            about = "" if "Pod" in event["reason"] else "its volumes are not ready: "
            return f"{about}{_short(event['message'])}"
    return "" if reason in ("", "ContainerCreating", "PodInitializing") else f"{reason}: {_short(message)}"


def _unpulled(message: str, events: Sequence[Object]) -> str:
    # While the kubelet waits to retry, its message has no cause, but an earlier event has it.
    texts = [message, *(event["message"] for event in newest_first(events) if event["reason"] == "Failed")]
    causes = (re.sub(_PULLING, "", text).strip() for text in texts)
    return next((f": {_short(cause)}" for cause in causes if cause), "")


def _ended(ended: Object) -> str:
    """Return a message about how a container ended: its exit code, and the last line of its output.

    If the container printed nothing, the message contains the meaning of the exit code instead.
    """
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return "killed, out of memory: increase memory, or use a smaller batch or fewer workers"
    if code is None:
        return "without a message"
    if outcome := _outcome(ended):
        return f"exit code {outcome.code}: {_short(outcome.message)}"
    lines = [line for line in ended.get("message", "").splitlines() if line.strip()]
    reason = _short(lines[-1]) if lines else _EXITS.get(code, "the script's own" if code < 128 else "a signal")
    return f"exit code {code}: {reason}"


def _outcome(ended: Object) -> Outcome | None:
    """Return the outcome that ddprun has written into a container's termination message, or None."""
    try:
        return read_outcome(ended.get("message", ""))
    except ValueError:
        return None


def why_no_pod(events: Sequence[Object]) -> str | None:
    """Return why pods or Services could not be created, or None if no event reports a reason."""
    for event in newest_first(events):
        if event["reason"] in ("FailedCreatePod", "FailedCreate", "FailedCreateService"):
            text = event["message"].removeprefix("Error creating: ")
            return _with_hint(text, text, HINTS)
    return None


def newest_first(events: Sequence[Object]) -> list[Object]:
    """Return the events sorted by time, the most recent event first."""
    return sorted(events, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", reverse=True)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _with_hint(sentence: str, message: str, hints: Mapping[str, str]) -> str:
    return ": ".join(filter(None, (sentence, hint_of(message, hints))))


def _short(text: str) -> str:
    return cut(" ".join(text.split()).rstrip("."), LONGEST, plain=True)


def conditions(job: Object) -> dict[str, Object]:
    """Return a job's conditions that are true, keyed by their types."""
    listed = job.get("status", {}).get("conditions", ())
    return {condition["type"]: condition for condition in listed if condition["status"] == "True"}


def has_ended(job: Object | None) -> bool:
    """Return whether a job has ended or does not exist."""
    return job is None or bool({"Succeeded", "Complete", "Failed"} & conditions(job).keys())


def waits_in_queue(job: Object) -> str:
    """Return the queue of Kueue that has suspended a job. Return an empty text if no queue has, or if ddpctl has."""
    metadata, spec = job["metadata"], job.get("spec", {})
    is_suspended = spec.get("suspend") or spec.get("runPolicy", {}).get("suspend")
    is_ours = SUSPENDED in metadata.get("annotations", {})
    return str(metadata.get("labels", {}).get(KUEUE, "")) if is_suspended and not is_ours else ""


def newest_pods(workload: Workload, pods: Sequence[Object], *, master: bool) -> dict[int, Object]:
    """Return the pod of each node. If a node has several pods, return the newest one."""
    by_age = sorted(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])
    newest = {workload.node(pod["metadata"], master): pod for pod in by_age}
    return dict(sorted(newest.items()))


def unexplained(workload: Workload, job: Object | None, pods: Sequence[Object], nodes: int) -> tuple[str, ...]:
    """Return the names of the objects whose events are needed to explain the run's state.

    These are the pods whose status does not say why they wait, and the job if some of its pods do not exist.
    """
    names = [pod["metadata"]["name"] for pod in pods if report(pod, workload.container).unexplained]
    if job is not None and not has_ended(job) and len(pods) < nodes and "Suspended" not in conditions(job):
        name = job["metadata"]["name"]
        names += [name, f"{name}-node-0"] if workload.word == "trainjob" else [name]
    return tuple(names)


def fold(
    run: Run, workload: Workload, job: Object | None, pods: Sequence[Object], events: Sequence[Object], *, now: float
) -> RunStatus:
    """Return a run's status at the time ``now`` (in seconds since the epoch)."""
    master = bool(run.options.get("master"))
    by_pod = {}
    for node, pod in newest_pods(workload, pods, master=master).items():
        own = [event for event in events if event["involvedObject"]["name"] == pod["metadata"]["name"]]
        by_pod[node] = report(pod, workload.container, own, now, final=has_ended(job))
    nodes = tuple(_node(node, by_pod.get(node)) for node in range(run.job.max_nodes))

    def result(state: State, message: str, code: int | None = None, *, remains: bool = False) -> RunStatus:
        about = one_line(message)
        status = RunStatus(run=run.name, state=state, message=about, code=code, nodes=nodes, remains=remains)
        if status.ended:  # a pod that is still being deleted does not count
            kept = holds(run.job, run.checkpoint_dir) is not None
            ended = tuple(replace(node, alive=False) for node in nodes)
            return replace(status, nodes=ended, has_logs=bool(by_pod), has_files=kept)
        return status

    if job is None:
        if any(pod.phase in ("waiting", "running", "stopping") for pod in by_pod.values()):
            return result("stopping", f"the {workload.kind} was deleted, and its pods are ending")
        if now - run.created < YOUNG_S:
            return replace(result("starting", "the cluster has not started it yet"), has_logs=False, has_files=False)
        gone = f"the {workload.kind} is no longer in the cluster, and neither are its pods and logs"
        cause = "it was deleted, or its time (keep) has passed"
        return result("lost", f"how it ended is unknown: {gone}; {cause}")
    true = conditions(job)
    if "deletionTimestamp" in job["metadata"]:
        return result("stopping", f"the {workload.kind} is being deleted; {_counted(by_pod, run)}")
    if "Succeeded" in true or "Complete" in true:
        return result("succeeded", f"the {workload.kind} has succeeded", Exit.OK, remains=True)
    if "Failed" in true:
        outcomes = [pod.outcome for pod in by_pod.values() if pod.outcome and pod.outcome.code]
        outcome = min(outcomes, key=lambda outcome: outcome.cause == "node_lost", default=None)
        code = outcome.code if outcome else next((pod.code for pod in by_pod.values() if pod.code), Exit.SCRIPT)
        status = result("failed", _why_failed(workload, true["Failed"], by_pod, outcome), code, remains=True)
        return replace(status, outcome=outcome)
    return result(*_going(workload, job, by_pod, events, run))


def _going(
    workload: Workload, job: Object, pods: Mapping[int, PodReport], events: Sequence[Object], run: Run
) -> tuple[State, str]:
    spec, are_ending = job.get("spec", {}), any(pod.phase in ("running", "stopping") for pod in pods.values())
    if (queue := waits_in_queue(job)) and not are_ending:
        return "pending", f"it is waiting for its queue '{queue}' to admit it"
    if "Suspended" in conditions(job) and not are_ending:
        text = "it is suspended and has no pods, but its checkpoints are kept; continue it with ddpctl resume"
        return "suspended", f"{text} {run.name}"
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        return "stopping", f"the {workload.kind} is being suspended; {_counted(pods, run)}"
    phases = [pod.phase for pod in pods.values()]
    final = [pod for pod in pods.values() if pod.phase == "failed" and pod.code not in (None, *RETRIED)]
    if "succeeded" in phases or final:  # all nodes end with the same outcome
        state: State = "stopping"
    elif "running" in phases:
        state = "running" if phases.count("running") == run.job.max_nodes else "rendezvous"
    else:
        state = "starting"
    return state, _why(workload, job, pods, events, run)


def _node(node: int, pod: PodReport | None) -> NodeReport:
    alive = pod is not None and pod.phase in ("waiting", "running", "stopping")
    note = f"{pod.name}: {pod.message}" if pod else "no pod"
    return NodeReport(node=node, alive=alive, state=None, outcome=None, note=note)


def _counted(pods: Mapping[int, PodReport], run: Run) -> str:
    running = sum(pod.phase == "running" for pod in pods.values())
    return f"{running} of {run.job.max_nodes} pod{'s' * (run.job.max_nodes != 1)} running"


def _why(workload: Workload, job: Object, pods: Mapping[int, PodReport], events: Sequence[Object], run: Run) -> str:
    done, nodes = sum(pod.phase == "succeeded" for pod in pods.values()), run.job.max_nodes
    if done == nodes:
        return f"all pods have ended with exit code 0; the {workload.kind} has not ended yet"
    for pod in pods.values():
        if pod.ill:
            return f"{pod.name}: {pod.message}"
    if done:
        return f"{done} of {nodes} pods have ended with exit code 0; the {workload.kind} has not ended yet"
    about_job = [event for event in events if event["involvedObject"]["name"].startswith(job["metadata"]["name"])]
    if len(pods) < nodes and (reason := why_no_pod(about_job)):
        return f"{_counted(pods, run)}: {reason}"
    restarts = sum(pod.restarts for pod in pods.values())
    again = f", {restarts} restart{'s' * (restarts != 1)} so far" if restarts else ""
    if any(pod.phase == "stopping" for pod in pods.values()):
        return f"{_counted(pods, run)}{again}: a pod is ending, and is replaced when it is gone"
    if not pods:
        restarting = "Restarting" in conditions(job)
        return f"the {workload.kind} {'is replacing its failed pods' if restarting else 'has no pods yet'}"
    return f"{_counted(pods, run)}{again}"


def _why_failed(workload: Workload, condition: Object, pods: Mapping[int, PodReport], outcome: Outcome | None) -> str:
    reason = condition.get("message", "")
    if "backoff limit" in reason:
        gone = "" if pods else ", and were deleted with their logs"  # the training-operator before 1.9.4 does this
        reason = f"its pods failed more often than backoffLimit allows{gone}"
    elif "because" in reason:
        reason = "a pod failed"
    if outcome:
        return f"{reason}: {outcome.message}"
    for pod in sorted(pods.values(), key=lambda pod: pod.code in (None, 0)):
        if pod.phase == "failed" or pod.code:
            return f"{reason}: {pod.name}: {pod.message}"
    return reason or f"the {workload.kind} has failed"
