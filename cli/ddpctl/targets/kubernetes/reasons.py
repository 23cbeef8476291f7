"""Why a pod is where it is, and what to do about it: one sentence for each of its states. Pure.

The states are those that Kubernetes 1.32 answered (tests/data/kubernetes/pods and events).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ddpctl.command import Output
from ddpctl.targets.kubernetes.answers import error_of
from ddpctl.words import one_line

Object = Mapping[str, Any]
Phase = Literal["waiting", "running", "stopping", "succeeded", "failed"]
_Make = Callable[[re.Match[str]], str]

LONGEST = 240  # of what the cluster says itself
_EXITS = {
    1: "the script failed", 65: "a data set or every checkpoint is corrupt", 66: "a file is missing",
    73: "the disk is full or read-only", 75: "it gave up after three attempts without progress",
    78: "its configuration is wrong", 127: "its program is not in the image", 137: "it was killed",
    139: "it crashed (SIGSEGV)", 142: "the other nodes did not come in time", 143: "it was asked to stop, and saved",
    144: "a rank hung",
}  # fmt: skip
_UNSCHEDULABLE: tuple[tuple[str, _Make], ...] = (
    (
        r"persistentvolumeclaim \"([^\"]+)\" not found",
        lambda m: f"the claim {m[1]} is not in the namespace: kubectl get pvc lists those that are",
    ),
    (
        r"unbound immediate PersistentVolumeClaims",
        lambda _: "a claim has no volume yet: kubectl describe pvc says why (no StorageClass, no volume of that size)",
    ),
    (
        r"(?:Insufficient|Too many) ([a-zA-Z0-9./_-]+[a-zA-Z0-9])",
        lambda m: f"no machine has enough {m[1]} free: wait for one, or ask for less",
    ),
    (
        r"didn't match Pod's node affinity/selector",
        lambda _: "no machine has the labels of node_selector: kubectl get nodes --show-labels",
    ),
    (
        r"untolerated taint \{([^}:]+)",
        lambda m: f"every machine keeps others away with the taint {m[1]}: tolerations lets the pod in",
    ),
    (
        r"didn't match pod topology spread constraints",
        lambda _: "there are fewer free machines than nodes: spread prefer puts two on one",
    ),
)
_UNPULLED: tuple[tuple[str, _Make], ...] = (
    (r"lookup (\S+?)(?: on \S+)?: no such host", lambda m: f"the registry {m[1]} is not known there"),
    (r"not found|manifest unknown", lambda _: "the registry has no such image or tag"),
    (
        r"unauthorized|authorization failed|denied|403 Forbidden|no basic auth",
        lambda _: "the registry asks for a password: image_pull_secrets names the Secret that holds it",
    ),
)


@dataclass(frozen=True, kw_only=True)
class PodReport:
    """What there is to say of one pod."""

    name: str
    phase: Phase
    words: str  # one sentence
    code: int | None = None  # of its container, the last time that it ended
    restarts: int = 0
    ill: bool = False  # something that does not go away by itself
    unexplained: bool = False  # only its events can say why


def report(pod: Object, container: str, events: Sequence[Object] = ()) -> PodReport:
    """A pod, in one sentence."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    found: Object = next((one for one in status.get("containerStatuses", ()) if one["name"] == container), {})
    state, last = found.get("state", {}), found.get("lastState", {}).get("terminated")
    restarts = found.get("restartCount", 0)

    def say(phase: Phase, words: str, **rest: Any) -> PodReport:
        ended = state.get("terminated") or last or {}
        return PodReport(
            name=name, phase=phase, words=one_line(words), code=ended.get("exitCode"), restarts=restarts, **rest
        )

    if status.get("reason") == "Evicted":
        return say("failed", _evicted(status.get("message", "")), ill=True)
    if "deletionTimestamp" in pod["metadata"]:
        return say("stopping", f"is ending, within {pod['metadata'].get('deletionGracePeriodSeconds', 30)} s")
    if "waiting" in state:
        words = _waiting(state["waiting"], last, found, events)
        return say("waiting", words or "its container is being made", ill=bool(words), unexplained=not words)
    if "terminated" in state:
        ended = state["terminated"]
        if ended["exitCode"] == 0:
            return say("succeeded", "done")
        if status.get("phase") == "Failed":
            return say("failed", _ended(ended), ill=True)
        return say("waiting", f"about to start again: {_ended(ended)}", ill=True)
    if "running" in state:
        again = f", started again {_times(restarts)}; before, {_ended(last)}" if restarts and last else ""
        return say("running", f"running{again}")
    return _not_started(pod, say)


def _not_started(pod: Object, say: Callable[..., PodReport]) -> PodReport:
    status = pod.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        done = status["phase"] == "Succeeded"
        return say("succeeded" if done else "failed", "done" if done else _short(status.get("message", "failed")))
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            if condition.get("reason") == "SchedulingGated":
                return say("waiting", "waits for its queue to let it start")
            return say("waiting", _unscheduled(condition.get("message", "")), ill=True)
    return say("waiting", "waits for a machine")


def _unscheduled(message: str) -> str:
    said = message.partition(" preemption:")[0]
    for pattern, make in _UNSCHEDULABLE:
        if match := re.search(pattern, said):
            return f"{make(match)} ({said.partition(': ')[0]})"
    return f"no machine takes it: {_short(said)}"


def _evicted(message: str) -> str:
    if "emptyDir" in message.lower() or "EmptyDir" in message:
        return f"evicted: {_short(message)}: write less there, or mount a claim"
    if "low on resource" in message:
        return f"evicted: {_short(message)}: request_memory reserves what it needs"
    return f"evicted: {_short(message)}"


def _waiting(waiting: Object, last: Object | None, found: Object, events: Sequence[Object]) -> str:
    """Empty where only time, or an event, can tell."""
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    image = found.get("image", "")
    match reason:
        case "ErrImagePull" | "ImagePullBackOff" | "RegistryUnavailable":
            why = next((make(m) for pattern, make in _UNPULLED if (m := re.search(pattern, message))), _short(message))
            return f"the image {image} cannot be pulled: {why}"
        case "ErrImageNeverPull":
            return f"the image {image} is not on the machine, and pull is Never: load it there, or pull IfNotPresent"
        case "InvalidImageName":
            return f"{image} is no name of an image: image says which"
        case "CrashLoopBackOff":
            return f"fails again and again, {_times(found.get('restartCount', 0))} so far: {_ended(last or {})}"
        case "CreateContainerConfigError":
            return _unconfigured(message)
        case "RunContainerError" | "CreateContainerError" | "StartError":
            if named := re.search(r"exec: \"([^\"]+)\": (.*?)(?:: unknown)?$", message):
                return f"{named[1]} cannot be started: {named[2]}: is it in the image?"
            return f"the container cannot be started: {_short(message)}"
    for event in reversed(events):
        if event["reason"] in ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedScheduling"):
            return (
                f"its volumes are not there: {_short(event['message'])}"
                if "Pod" not in event["reason"]
                else _short(event["message"])
            )
    return "" if reason in ("", "ContainerCreating", "PodInitializing") else f"{reason}: {_short(message)}"


def _unconfigured(message: str) -> str:
    if named := re.search(r"(secret|configmap) \"([^\"]+)\" not found", message):
        return f"the {named[1]} {named[2]} is not in the namespace: kubectl get {named[1]}s lists those that are"
    if named := re.search(r"couldn't find key (\S+) in (Secret|ConfigMap) (\S+)", message):
        return f"the {named[2]} {named[3]} has no key {named[1]}"
    if "runAsNonRoot" in message:
        return "the image would run as root, which the pod forbids: its user must be a number that is not 0"
    return f"the container cannot be set up: {_short(message)}"


def _ended(ended: Object) -> str:
    """How a container ended: what it said last, else what its code means."""
    code = ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return "killed, out of memory: give it more memory, or less to do (a smaller batch, fewer workers)"
    if code is None:
        return "it does not say why"
    lines = [line for line in ended.get("message", "").splitlines() if line.strip()]
    said = _short(lines[-1]) if lines else _EXITS.get(code, "the script's own" if code < 128 else "a signal")
    return f"exit code {code}: {said}"


def why_no_pod(events: Sequence[Object]) -> str | None:
    """What the newest event says of pods or Services that could not be made; None: nothing."""
    for event in sorted(events, key=_when, reverse=True):
        if event["reason"] in ("FailedCreatePod", "FailedCreate", "FailedCreateService"):
            text = re.sub(r"^Error creating: ", "", event["message"])
            if too_long := re.search(r"must be no more than (\d+) (?:characters|bytes)", text):
                return (
                    f"its name is too long for its pods' Services: at most {too_long[1]} characters with their endings"
                )
            error = error_of(Output(returncode=1, stderr=f"Error from server (Forbidden): {text}"))
            return str(error)
    return None


def newest_first(events: Sequence[Object]) -> list[Object]:
    """Events by the time of their last occurrence."""
    return sorted(events, key=_when, reverse=True)


def _when(event: Object) -> str:
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _short(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
