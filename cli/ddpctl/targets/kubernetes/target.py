"""The verbs of the target kubernetes, as commands for kubectl."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError, NoInputError
from ddpctl.look import Look, Seen
from ddpctl.plan import Plan
from ddpctl.run import Run, RunStatus
from ddpctl.script import find_script
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.kubernetes import looking, submission
from ddpctl.targets.kubernetes.answers import check, error_of
from ddpctl.targets.kubernetes.discovery import find_cluster, workload_of
from ddpctl.targets.kubernetes.kubectl import Kubectl, items
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import RUN_LABEL, needs_project
from ddpctl.targets.kubernetes.status import fold, newest_pods, unexplained
from ddpctl.targets.kubernetes.task import Task
from ddpctl.targets.kubernetes.workloads import WORKLOADS

YOUNG_S = 10.0  # how long a launch may take from its record to its job
STOP_MARGIN_S = 40  # beyond the grace: what a pod's own grace has beyond it, and the cluster's own time
KILL_WAIT_S = 30
COMPANIONS = "configmaps,secrets,services,networkpolicies.networking.k8s.io"


class KubernetesTarget:
    """Nodes as pods of a cluster."""

    def __init__(self, options: KubernetesOptions) -> None:
        self.options = options

    def render(self, plan: Plan) -> str:
        """The manifests: kubectl apply -f."""
        return submission.render(plan, self.options)

    def expect(self, plan: Plan) -> Verb[None]:
        """The script is in the project, unless the image has it: by its full path, or where ``project`` is empty."""
        if needs_project(plan.job) and self.options.project:
            yield from find_script(plan)

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- others end with it
        """Let the cluster judge the job and its pod, then make them. The run never ends with its ddpctl."""
        return submission.submit(plan, self.options)

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Ask for the jobs and the pods of each namespace, and where these do not explain themselves for events."""
        found: dict[str, RunStatus] = {}
        for handle in {json.dumps(_place(run.handle), sort_keys=True) for run in runs if run.handle}:
            group = [run for run in runs if run.handle and json.dumps(_place(run.handle), sort_keys=True) == handle]
            for state in (yield from self._status_of(group, now)):
                found[state.run] = state
        lost = "its launch was interrupted before the cluster had it: ddpctl stop sees to what there may be"
        return tuple(found.get(run.name, RunStatus(run=run.name, state="lost", message=lost, code=137)) for run in runs)

    def _status_of(self, runs: list[Run], now: float) -> Verb[list[RunStatus]]:
        kubectl, workload = _kubectl(runs[0]), workload_of(runs[0].handle)
        selector = f"{RUN_LABEL} in ({','.join(run.name for run in runs)})"
        answers = yield tuple(kubectl.get(what, "--selector", selector) for what in (workload.resource, "pods"))
        for answer in answers:
            if answer.returncode:
                return [RunStatus(run=run.name, state="unknown", message=str(error_of(answer))) for run in runs]
        jobs = {_run_name(job): job for job in items(answers[0])}
        pods = {run.name: [pod for pod in items(answers[1]) if _run_name(pod) == run.name] for run in runs}
        asked = [
            name
            for run in runs
            for name in unexplained(workload, jobs.get(run.name), pods[run.name], run.job.max_nodes)
        ]
        events: list[dict[str, Any]] = []
        if asked:
            told = yield tuple(
                kubectl.get("events", "--field-selector", f"type=Warning,involvedObject.name={name}") for name in asked
            )
            events = [event for answer in told if answer.returncode == 0 for event in items(answer)]
        return [
            fold(run, workload, jobs.get(run.name), pods[run.name], events, young=now - run.created < YOUNG_S)
            for run in runs
        ]

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the pods' logs, from before a restart as well; follow them through restarts to the job's end."""
        _check_query(run, query)
        kubectl, workload = _kubectl(run), workload_of(run.handle)
        only = _pattern(query)
        if query.follow:
            task = Task(
                run=run.name,
                nodes=run.job.max_nodes,
                created=run.created,
                workload=workload.word,
                master=self.options.master,
                context=kubectl.context,
                namespace=kubectl.namespace,
                only=only,
                only_nodes=query.nodes,
                tail=query.tail,
            )
            program = (sys.executable, "-P", "-m", "ddpctl.pod_logs", json.dumps(asdict(task)))
            yield (Command(argv=program, mode="stream", timeout_s=None),)
            return
        pods = yield from self._pods(run)
        tail = () if query.tail is None else ("--tail", str(query.tail))
        commands = []
        for node, pod in pods.items():
            if query.nodes and node not in query.nodes:
                continue
            argv = (*kubectl.argv, "logs", pod["metadata"]["name"], "--container", workload.container, *tail)
            for one in pod["status"].get("containerStatuses", ()):
                if one["name"] == workload.container and one["restartCount"]:
                    commands.append((*argv, "--previous"))
                if one["name"] == workload.container and one["state"].keys() & {"running", "terminated"}:
                    commands.append(argv)
        if not commands:
            (state,) = yield from self.status((run,), now=run.created + YOUNG_S)
            raise NoInputError(f"{run.name} has no pod whose log could be read: {state.message}")
        for argv in commands:
            yield (Command(argv=_filtered(argv, only), mode="stream", timeout_s=None),)

    def look(self, run: Run, look: Look) -> Verb[tuple[Seen, ...]]:
        """Ask in every pod that runs; of one that has ended there is its log."""
        pods = yield from self._pods(run)
        return (yield from looking.look(run, look, _kubectl(run), workload_of(run.handle), pods))

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Delete the job, whose pods then have their grace, and all that belongs to it."""
        kubectl = _kubectl(run) if run.handle else (yield from find_cluster(self.options))
        quietly = ("--ignore-not-found", "--wait=false")
        found = [workload_of(run.handle)] if run.handle else list(WORKLOADS.values())
        jobs = yield tuple(
            kubectl.run("delete", workload.resource, run.name, *quietly, "--cascade=foreground") for workload in found
        )
        if run.handle:
            check(*jobs)
        if kill:
            mine = ("--selector", f"{RUN_LABEL}={run.name}")
            check(*(yield (kubectl.run("delete", "pods", *mine, *quietly, "--grace-period=1"),)))
        trains = any(workload.word == "trainjob" for workload in found)
        runtimes = ("trainingruntimes.trainer.kubeflow.org",) if trains else ()
        yield tuple(kubectl.run("delete", what, run.name, *quietly) for what in (COMPANIONS, *runtimes))
        wait_s = KILL_WAIT_S if kill else int(run.job.grace) + STOP_MARGIN_S
        if wait:
            gone = ("wait", "pods", "--for=delete", "--selector", f"{RUN_LABEL}={run.name}", f"--timeout={wait_s}s")
            yield (Command(argv=(*kubectl.argv, *gone), timeout_s=wait_s + 10),)
        (left,) = yield (kubectl.get("pods", "--selector", f"{RUN_LABEL}={run.name}"),)
        check(left)
        return not items(left)

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command in a node's container: its exit code. No arguments: a shell."""
        pods = yield from self._pods(run)
        if node not in pods:
            raise NoInputError(f"{run.name} has no pod for node {node}: its nodes are 0 to {run.job.max_nodes - 1}")
        kubectl, workload = _kubectl(run), workload_of(run.handle)
        options = ("--stdin", "--tty") if tty else ()
        argv = argv or ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
        name = pods[node]["metadata"]["name"]
        words = (*kubectl.argv, "exec", *options, name, "--container", workload.container, "--", *argv)
        (done,) = yield (Command(argv=words, mode="tty" if tty else "stream", timeout_s=None),)
        return done.returncode

    def suspend(self, run: Run) -> Verb[None]:
        """End the pods, which save first, and keep the job."""
        yield from self._patch_suspend(run, "true")

    def resume(self, run: Run) -> Verb[None]:
        """Let a suspended job have pods again."""
        yield from self._patch_suspend(run, "false")

    def _patch_suspend(self, run: Run, value: str) -> Verb[None]:
        workload = workload_of(run.handle)
        patch = workload.suspend % value
        (done,) = yield (_kubectl(run).run("patch", workload.resource, run.name, "--type=merge", "--patch", patch),)
        if done.returncode and "NotFound" in done.stderr:
            raise ConfigError(f"{run.name} is not in the cluster any more: ddpctl launch --resume {run.name}")
        check(done)

    def _pods(self, run: Run) -> Verb[dict[int, Any]]:
        """The pod of each node."""
        (answer,) = yield (_kubectl(run).get("pods", "--selector", f"{RUN_LABEL}={run.name}"),)
        check(answer)
        return newest_pods(workload_of(run.handle), items(answer), master=self.options.master)


def _kubectl(run: Run) -> Kubectl:
    return Kubectl(context=run.handle.get("context"), namespace=run.handle.get("namespace"))


def _place(handle: Mapping[str, Any]) -> dict[str, Any]:
    return {key: handle.get(key) for key in ("context", "namespace", "workload")}


def _run_name(thing: Mapping[str, Any]) -> str:
    return str(thing["metadata"].get("labels", {}).get(RUN_LABEL, ""))


def _check_query(run: Run, query: LogQuery) -> None:
    nodes, ranks = run.job.max_nodes, run.job.max_nodes * run.job.gpus
    if any(node >= nodes for node in query.nodes) or any(rank >= ranks for rank in query.ranks):
        raise NoInputError(f"{run.name} has no such log: its nodes are 0 to {nodes - 1}, its ranks 0 to {ranks - 1}")


def _pattern(query: LogQuery) -> str | None:
    """What a line of these ranks begins with; a node's own lines have no rank."""
    return rf"^\[node[0-9]+ rank({'|'.join(map(str, query.ranks))})\] " if query.ranks else None


def _filtered(argv: tuple[str, ...], only: str | None) -> tuple[str, ...]:
    if only is None:
        return argv
    return ("sh", "-c", 'only=$1; shift; "$@" | grep -E -e "$only" || true', "sh", only, *argv)
