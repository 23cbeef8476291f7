"""A look into pods, as commands for kubectl: by a shell in each that runs; of one that has ended its log. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ddpctl.command import Command, Verb
from ddpctl.look import TIMEOUT_S, Look, Seen, read, script
from ddpctl.run import Run
from ddpctl.targets.kubernetes.kubectl import Kubectl
from ddpctl.targets.kubernetes.workloads import Workload
from ddpwire import names
from ddpwire.folder import NODE_LOG, node_name

LOG_LINES = 2000


def look(
    run: Run, look: Look, kubectl: Kubectl, workload: Workload, pods: Mapping[int, Mapping[str, Any]]
) -> Verb[tuple[Seen, ...]]:
    """What every node's pod answers, by node."""
    nodes = [node for node in range(run.job.max_nodes) if node in pods]
    outputs = yield tuple(_ask(look, kubectl, workload, node, pods[node]) for node in nodes)
    seen = {}
    for node, output in zip(nodes, outputs, strict=True):
        if _runs(pods[node]):
            (seen[node],) = read(output, (node,))
        elif output.returncode == 0:
            seen[node] = Seen(node=node, files={NODE_LOG: output.stdout}, failure="its pod has ended")
        else:
            seen[node] = Seen(node=node, failure=(output.stderr.strip().splitlines() or ["its pod has ended"])[-1])
    seen = {node: replace(one, placed=_scheduled(pods[node])) for node, one in seen.items()}
    return tuple(seen.get(node, Seen(node=node, failure="it has no pod")) for node in range(run.job.max_nodes))


def _ask(look: Look, kubectl: Kubectl, workload: Workload, node: int, pod: Mapping[str, Any]) -> Command:
    name = pod["metadata"]["name"]
    where = (name, "--container", workload.container)
    if not _runs(pod):
        return kubectl.run("logs", *where, f"--tail={LOG_LINES}")
    text = script(look, (f'"${names.RUN_DIR}/{node_name(node)}"',))
    argv = (*kubectl.argv, "exec", "--stdin", *where, "--", "sh")
    return Command(argv=argv, stdin=text, timeout_s=TIMEOUT_S)


def _runs(pod: Mapping[str, Any]) -> bool:
    return bool(pod["status"].get("phase") == "Running")


def _scheduled(pod: Mapping[str, Any]) -> float | None:
    """When it got its machine; what follows is the pull of its image."""
    for condition in pod["status"].get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "True":
            return datetime.fromisoformat(condition["lastTransitionTime"]).timestamp()
    return None
