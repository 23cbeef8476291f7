"""Fetches the files of a run's nodes from pods, from the logs of ended pods, and from volumes."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpctl.command import Command, Verb, call
from ddpctl.errors import NoInputError
from ddpctl.execution.node_probe import TIMEOUT_S, Probe, ProbeResult, probe_script, read_probe
from ddpctl.files.pull import Place, pull_places
from ddpctl.runs.run_store import Run
from ddpctl.targets.kubernetes.kubectl import Kubectl, check, kubectl_of, workload_of
from ddpctl.targets.kubernetes.options import KubernetesOptions, holds
from ddpctl.targets.kubernetes.pod import dump, reader
from ddpwire import log_record, names
from ddpwire.run_files import CHECKPOINTS, NODE_LOG, node_name

Pods = Mapping[int, Mapping[str, Any]]  # the pod of each node
LOG_LINES = 2000
PLACED = "placed"  # name of a file in a node's folder, with the time at which the node was first scheduled
STOP_S = 15.0  # how long to wait for the files of a run that is to be stopped
READER_S = 180  # how long the pod that reads a PersistentVolumeClaim may take to start


def probe_pods(
    run: Run, probe: Probe, kubectl: Kubectl, pods: Pods, *, timeout_s: float = TIMEOUT_S
) -> Verb[tuple[ProbeResult, ...]]:
    """Return the metrics and files of each node, in the order of the nodes.

    They come from the node's pod. If the pod has ended, they come from the pod's log, and from the files that were
    saved on this machine.
    """
    nodes, container = range(run.job.max_nodes), workload_of(run.handle).container
    name_of = {node: pod["metadata"]["name"] for node, pod in pods.items()}
    running = [node for node in nodes if node in pods and _runs(pods[node])]
    ended = [node for node in nodes if node in pods and node not in running]
    scripts = {node: probe_script(probe, (f'"${names.RUN_DIR}/{node_name(node)}"',)) for node in running}
    log = ("--container", container, f"--tail={LOG_LINES}")
    commands = (
        *(replace(_shell(kubectl, name_of[node], container), stdin=scripts[node]) for node in running),
        *(kubectl.run("logs", name_of[node], *log) for node in ended),
    )
    outputs = yield tuple(replace(command, timeout_s=timeout_s) for command in commands)
    seen = {}
    for node, output in zip((*running, *ended), outputs, strict=True):
        if node in running:
            (seen[node],) = read_probe(output, (node,))
        elif output.returncode == 0:
            files = {NODE_LOG: log_record.without(output.stdout), **log_record.unpack(output.stdout)}
            seen[node] = ProbeResult(node=node, files=files, failure="" if len(files) > 1 else "its pod has ended")
        else:
            seen[node] = ProbeResult(node=node, failure=output.last_line("its pod has ended"))
        seen[node] = replace(seen[node], placed=scheduled(pods[node]))
    if away := [node for node in nodes if node not in running]:  # the files that were saved on this machine
        folders = [shlex.quote(str(Path(run.folder, node_name(node)))) for node in away]
        wanted = (*(name for name in probe.files if name in log_record.FILES), PLACED)
        text = probe_script(replace(probe, metrics=False, placed=False, files=wanted), folders)
        (output,) = yield (Command(argv=("/bin/sh",), stdin=text, timeout_s=TIMEOUT_S, probe=True),)
        for result in read_probe(output, away):
            pod = seen.get(result.node, ProbeResult(node=result.node, failure="it has no pod"))
            saved = {**result.files}
            placed = tuple(map(float, saved.pop(PLACED, "").split())) or pod.placed
            failure = "" if saved else pod.failure
            seen[result.node] = replace(pod, files={**saved, **pod.files}, placed=placed, failure=failure)
    return tuple(seen[node] for node in nodes)


def _shell(kubectl: Kubectl, pod: str, container: str) -> Command:
    return Command(argv=(*kubectl.argv, "exec", "--stdin", pod, "--container", container, "--", "sh"))


def _runs(pod: Mapping[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def scheduled(pod: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the time at which a pod got a machine, or an empty tuple if it has none."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return (datetime.fromisoformat(condition["lastTransitionTime"]).timestamp(),)
    return ()


def save_nodes(run: Run, kubectl: Kubectl, pods: Pods) -> Verb[dict[int, str]]:
    """Save the logs, and the files for ``timeline`` and ``report``, in the run's local folder. See ``save_logs``."""
    if pods:
        seen = yield from probe_pods(run, Probe(metrics=False, files=log_record.FILES), kubectl, pods, timeout_s=STOP_S)
        nodes = {
            result.node: {name: text for name, text in result.files.items() if name in log_record.FILES}
            for result in seen
        }
        yield (call(save, run, nodes, {result.node: result.placed for result in seen}),)
    return (yield from save_logs(run, pods))


def save_logs(run: Run, pods: Pods, *, end_s: float | None = None) -> Verb[dict[int, str]]:
    """Save the logs of the pods, with the time of each line, and the files in these logs in the run's local folder.

    ``end_s``: wait at most so many seconds until the containers have ended. Return the error of each node whose log
    cannot be read.
    """
    argvs = [(node, argv) for node, pod in pods.items() for argv in log_commands(run, pod, "--timestamps")]
    if not argvs:
        return {}
    follow = () if end_s is None else ("--follow",)
    say = f"saving the logs until all pods have ended ({end_s:g} s at most)" if end_s else ""
    commands = (
        Command(argv=argv if "--previous" in argv else (*argv, *follow), timeout_s=end_s or STOP_S, say=say)
        for _, argv in argvs
    )
    logs: dict[int, str] = {}
    errors: dict[int, str] = {}
    for (node, _), output in zip(argvs, (yield tuple(commands)), strict=True):
        if output.returncode:
            errors[node] = output.last_line()
        else:
            logs[node] = logs.get(node, "") + output.stdout
    plain = {node: re.sub(r"(?m)^\S+Z ", "", text) for node, text in logs.items()}
    yield (call(save, run, {node: {NODE_LOG: text, **log_record.unpack(plain[node])} for node, text in logs.items()}),)
    return errors


def log_commands(run: Run, pod: Mapping[str, Any], *options: str) -> list[tuple[str, ...]]:
    """Return the commands that print a pod's log, beginning with the log from before its container's last restart."""
    container = workload_of(run.handle).container
    argv = (*kubectl_of(run.handle).argv, "logs", pod["metadata"]["name"], "--container", container, *options)
    commands = []
    for status in pod["status"].get("containerStatuses", ()):
        if status["name"] == container and status["restartCount"]:
            commands.append((*argv, "--previous"))
        if status["name"] == container and status["state"].keys() & {"running", "terminated"}:
            commands.append(argv)
    return commands


def saved_logs(run: Run, nodes: Iterable[int]) -> Verb[list[str]]:
    """Return the paths of those logs of these nodes that ``save_logs`` has saved."""
    paths = [str(Path(run.folder, node_name(node), NODE_LOG)) for node in nodes]
    (listed,) = yield (Command(argv=("ls", "--", *paths), probe=True),)
    existing = listed.stdout.splitlines()
    return [path for path in paths if path in existing]


def save(run: Run, nodes: Mapping[int, Mapping[str, str]], placed: Mapping[int, tuple[float, ...]] = {}) -> None:
    """Save the files of nodes and the times at which they were scheduled in the run's local folder. Raises OSError."""
    saved = {node: files for node, files in nodes.items() if files}
    for node, files in saved.items():
        log_record.keep(Path(run.folder, node_name(node)), files)
    keep_placed(Path(run.folder), {node: placed.get(node, ()) for node in saved})


def keep_placed(folder: Path, placed: Mapping[int, tuple[float, ...]]) -> None:
    """Save the time at which each node was first scheduled. Raises OSError."""
    for node, times in placed.items():
        node_dir = folder / node_name(node)
        if times and not (node_dir / PLACED).exists():
            log_record.keep(node_dir, {PLACED: f"{times[0]}\n"})


def pull_files(
    run: Run, options: KubernetesOptions, kubectl: Kubectl, pods: Pods, into: str, *, best: bool
) -> Verb[tuple[str, ...]]:
    """Copy the files of a run to the local folder ``into``. Return a line about each thing that is missing.

    If no pod runs, the files are read from the run's PersistentVolumeClaim, in a pod that is created for this purpose.
    Raises NoInputError if there is neither a pod nor a claim.
    """
    folders = {"": f'"${names.RUN_DIR}"', CHECKPOINTS: f'"${names.CHECKPOINT_DIR}"'}

    def place(pod: str, container: str) -> Place:
        return Place(name=pod, shell=_shell(kubectl, pod, container), folders=folders)

    running = {pod["metadata"]["name"]: node for node, pod in pods.items() if _runs(pod)}
    mount = holds(run.job, run.checkpoint_dir)
    claim = mount.source if mount and mount.kind == "pvc" else None
    if not running and claim is None:
        to_do = "to keep them, set mounts [pvc=CLAIM:/runs]"
        raise NoInputError(f"the files of run '{run.name}' were deleted with its pods: {to_do}")
    if running:
        places = [place(name, workload_of(run.handle).container) for name in running]
        missing = yield from pull_places(run.name, places, into, best=best)
        away = [node for node in range(run.job.max_nodes) if node not in running.values() and claim is None]
        return (*missing, *(f"node {node}: its pod does not run" for node in away))
    pod = reader(run.name, run.uid, run.job, options, run.checkpoint_dir)
    name = pod["metadata"]["name"]
    delete = kubectl.run("delete", "pod", name, "--ignore-not-found", "--grace-period=1")
    yield (delete,)  # the pod of an interrupted pull
    check(*(yield (kubectl.create(dump((pod,))),)))
    try:
        wait = ("wait", f"pod/{name}", "--for=condition=Ready", f"--timeout={READER_S}s")
        (ready,) = yield (Command(argv=(*kubectl.argv, *wait), timeout_s=READER_S + 10),)
        ready.check(f"the pod {name}, which reads the claim {claim}, does not start (kubectl describe pod)")
        missing = yield from pull_places(run.name, [place(name, "reader")], into, best=best)
    except Exception:
        yield (delete,)
        raise
    yield (delete,)
    return missing
