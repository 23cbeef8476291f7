"""The operations (verbs) of the target kubernetes, which run kubectl."""

import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from ddpctl.command import Command, Verb, call
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import Probe, ProbeResult
from ddpctl.job.launch_plan import Plan, find_script, script_of, title
from ddpctl.job.secrets import read_secrets
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import Capability, LogQuery, Lookup, StopSignal, Submission, Target, no_such_log
from ddpctl.targets.kubernetes import manifests, project
from ddpctl.targets.kubernetes.files import log_commands, probe_pods, pull_files, save_logs, save_nodes, saved_logs
from ddpctl.targets.kubernetes.kubectl import (
    Kubectl,
    check,
    choose_workload,
    error_of,
    find_cluster,
    is_absent,
    items,
    keeps_secrets,
    kubectl_of,
    read_runtime,
    workload_of,
)
from ddpctl.targets.kubernetes.log_follower import Task
from ddpctl.targets.kubernetes.manifests import SUSPENDED, WORKLOADS, Workload
from ddpctl.targets.kubernetes.options import RUNS, WORKSPACE, KubernetesOptions, holds, mounts_of, name_problem
from ddpctl.targets.kubernetes.pod import (
    RUN_LABEL,
    UID_LABEL,
    Draft,
    Object,
    checkpoint_dir,
    drop_empty,
    dump,
    is_ours,
    manifest,
    needs_project,
    reader_name,
    selector_of,
)
from ddpctl.targets.kubernetes.status import DELAYS, YOUNG_S, fold, newest_pods, unexplained, waits_in_queue
from ddpctl.text import counted, one_line, some
from ddpwire.exits import Exit
from ddpwire.run_files import STORE_SECRET

STOP_MARGIN_S = 40  # added to the ranks' grace period: pod.SAVE_S, and time for the cluster itself
KILL_WAIT_S = 30
COMPANIONS: tuple[str, ...] = ("configmaps", "secrets", "services", "networkpolicies.networking.k8s.io")
RUNTIMES = "trainingruntimes.trainer.kubeflow.org"
NO_RUNTIME_YET = "trainingRuntime must be created before"  # from Kubeflow Trainer's webhook
RUNTIME_PAUSES_S = (1, 2, 4, 8)  # between attempts to create a TrainJob whose runtime was created a moment before
MOST_NAMES = 10
UNSIGNED = (
    "the values in the run's store are not signed, because you may not create Secrets (see k8s/rbac-secrets.yaml)"
)
RECORD_LINE = r"^([^ []+ )?\[node[0-9]+\] ddprun-record "  # a timestamp may precede it


class KubernetesTarget(Target):
    """The target kubernetes, whose nodes are pods."""

    kind = "kubernetes"
    capabilities = frozenset[Capability]({"pull", "queue", "stop", "suspend", "sweep"})

    options: KubernetesOptions

    def render(self, plan: Plan) -> str:
        """Return the manifests of a job for ``kubectl apply -f``."""
        workload = WORKLOADS["pytorchjob" if self.options.workload == "auto" else self.options.workload]
        draft = Draft(plan=plan, options=self.options, project={})
        _check(draft, workload)
        if self.options.runtime:
            raise ConfigError("runtime: ddpctl render does not read the cluster: use ddpctl launch --dry-run")
        lines = [f"# {title(plan.job)} on Kubernetes, as a {workload.kind}. Rendered by ddpctl render."]
        lines += [f"# {line}" for line in spec_notes(draft, workload.operator)]
        if workload.word == "trainjob":
            lines.append(
                "# If Trainer's webhook refuses the TrainJob because the webhook does not see the runtime yet, apply "
                "this file again. In a kustomization, set sortOptions: {order: fifo}, or the TrainJob comes first."
            )
        return "\n".join(lines) + "\n" + dump((*_companions(draft), *workload.before(draft), workload.job(draft)))

    def expect(self, plan: Plan) -> Verb[None]:
        """Check that the project contains the training script, unless the image may contain it."""
        if needs_project(plan.job) and self.options.project:
            yield from find_script(plan)

    def resolve(self) -> Verb[KubernetesOptions]:
        """Return the options with kubectl's current context and namespace, so that later verbs use the same ones."""
        kubectl = yield from find_cluster(self.options)
        return replace(self.options, context=kubectl.context, namespace=kubectl.namespace)

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- the job outlives ddpctl
        """Have the cluster validate the job's objects, then create these objects.

        If what was created is deleted again, the error has the field ``is_undone``.
        """
        kubectl, workload, draft, needed, note = yield from _prepare(plan, self.options, self.environ)
        try:
            is_signed = yield from _make(kubectl, draft, workload, needed)
        except DdpctlError as error:
            kinds = sorted({item["kind"].lower() for item in needed})
            try:
                made = yield from _made(kubectl, kinds, draft.plan.name, plan.uid, needed=kinds)
                named = ([",".join(made), draft.plan.name, "--ignore-not-found", "--wait=false"],) if made else ()
                check(*(yield tuple(kubectl.run("delete", *arguments) for arguments in named)))
            except DdpctlError:
                raise error from None
            # If the cluster did not answer, it may have created the job.
            error.fields |= {"submission": None} if isinstance(error, UnavailableError) else {"is_undone": True}
            raise
        table = () if is_signed else (UNSIGNED,)
        handle = _handle(kubectl, workload, plan.name)
        return Submission(handle=handle, note=note, table=table, checkpoint_dir=checkpoint_dir(plan))

    def locate(self, run: Run) -> Verb[Lookup]:
        """Find the job by its name and the uid of its launch."""
        kubectl, label = (yield from find_cluster(self.options)), "-o=jsonpath={.metadata.labels}"
        for workload in WORKLOADS.values():
            (answer,) = yield (kubectl.run("get", workload.resource, run.name, "--ignore-not-found", label),)
            if answer.returncode and not is_absent(answer):
                return Lookup(state="unknown", message=str(error_of(answer)))
            if run.uid and f'"{UID_LABEL}":"{run.uid}"' in answer.stdout:
                return Lookup(state="exists", handle=_handle(kubectl, workload, run.name))
        return Lookup(state="absent")

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of each run from its job and its pods.

        If these do not explain the run's state, also query their events.
        """
        states: dict[str, RunStatus] = {}
        groups: dict[tuple[Any, ...], list[Run]] = {}
        for run in runs:
            if run.handle:
                groups.setdefault((kubectl_of(run.handle), run.handle["workload"]), []).append(run)
        for group in groups.values():
            states |= {state.run: state for state in (yield from self._status_of(group, now))}
        lost = "its launch was interrupted before the job was created: ddpctl stop removes what is left"
        gone = RunStatus(run="", state="lost", message=lost, code=Exit.KILLED, has_logs=False, has_files=False)
        return tuple(states.get(run.name, replace(gone, run=run.name)) for run in runs)

    def _status_of(self, runs: list[Run], now: float) -> Verb[list[RunStatus]]:
        kubectl, workload = kubectl_of(runs[0].handle), workload_of(runs[0].handle)
        selector = f"{RUN_LABEL} in ({','.join(run.name for run in runs)})"
        answers = yield tuple(kubectl.get(resource, "--selector", selector) for resource in (workload.resource, "pods"))
        for answer in answers:
            if answer.returncode:
                return [RunStatus(run=run.name, state="unknown", message=str(error_of(answer))) for run in runs]
        jobs = {_run_name(job): job for job in items(answers[0])}
        jobs = {run.name: jobs[run.name] for run in runs if run.name in jobs and is_ours(jobs[run.name], run.uid)}
        every = [(_run_name(pod), pod) for pod in items(answers[1])]
        pods = {run.name: [pod for name, pod in every if name == run.name and is_ours(pod, run.uid)] for run in runs}
        waiting = (unexplained(workload, jobs.get(run.name), pods[run.name], run.job.max_nodes) for run in runs)
        queries = tuple(kubectl.events_of(name) for names in waiting for name in names)
        outputs = (yield queries) if queries else ()
        events = [event for answer in outputs if answer.returncode == 0 for event in items(answer)]
        return [fold(run, workload, jobs.get(run.name), pods[run.name], events, now=now) for run in runs]

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the logs of the pods, including the log from before a container's last restart.

        ``query.follow``: print until the job ends, even if pods are replaced.
        """
        if any(n >= run.job.max_nodes for n in query.nodes) or any(r >= run.job.world_size for r in query.ranks):
            raise no_such_log(run)
        only = _pattern(run, query)
        if query.follow:
            task = Task(
                folder=run.folder,
                only=only,
                only_nodes=query.nodes,
                tail=query.tail,
                timestamps=query.timestamps,
                replace_lost=self.options.replace_lost,
            )
            program = (sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.log_follower", json.dumps(asdict(task)))
            yield (Command(argv=program, mode="stream", timeout_s=None),)
            return
        pods = yield from self._pods(run)
        options: tuple[str, ...] = () if query.tail is None else ("--tail", str(query.tail))
        options += ("--timestamps",) if query.timestamps else ()
        nodes = query.nodes or range(run.job.max_nodes)
        commands = [argv for node in nodes if node in pods for argv in log_commands(run, pods[node], *options)]
        if not commands:  # the logs that stop has saved
            end = "+1" if query.tail is None else str(query.tail)
            text = 'tail -n "$1" -- "$2"' + ("" if query.timestamps else " | cut -d ' ' -f 2-")
            commands = [("sh", "-c", text, "sh", end, path) for path in (yield from saved_logs(run, nodes))]
        if not commands:
            (state,) = yield from self.status((run,), now=run.created + YOUNG_S)
            raise NoInputError(f"run '{run.name}' has no readable log: {state.message}")
        # If all lines are wanted, only the records are left out: the log lines in which nodes save their files.
        keeps, pattern = ("-E", only) if only else ("-vE", RECORD_LINE)
        text = 'how=$1 only=$2; shift 2; "$@" | grep "$how" -e "$only" || true'
        for argv in commands:
            filtered = ("sh", "-c", text, "sh", keeps, pattern, *argv)
            yield (Command(argv=filtered, mode="stream", timeout_s=None),)

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return the metrics and files of each node. For an ended pod, use its log and the files saved locally."""
        pods = yield from self._pods(run)
        return (yield from probe_pods(run, probe, kubectl_of(run.handle), pods))

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Copy the run's files from its running pods. If no pod runs, copy them from its PersistentVolumeClaim."""
        if not run.handle:
            raise NoInputError(f"run '{run.name}' has no log: its launch was interrupted before it had pods")
        pods = yield from self._pods(run)
        return (yield from pull_files(run, self.options, kubectl_of(run.handle), pods, into, best=best))

    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Delete the job and all objects that belong to it. Its pods then have their grace period to save.

        The logs, events and outcomes of the pods are saved before, and again when the pods have ended.
        An object with the run's name but another uid is not deleted, because it belongs to another launch.
        """
        kubectl = kubectl_of(run.handle) if run.handle else (yield from find_cluster(self.options))
        quietly = ("--ignore-not-found", "--wait=false")
        workloads = [workload_of(run.handle)] if run.handle else list(WORKLOADS.values())
        runtimes: tuple[str, ...] = (RUNTIMES,) if any(workload.word == "trainjob" for workload in workloads) else ()
        companions, selector = COMPANIONS, selector_of(run.name, run.uid)
        if run.uid:
            jobs_of = tuple(workload.resource for workload in workloads)
            needed = (*COMPANIONS, *(jobs_of if run.handle else ()))  # without a handle, the workload is unknown
            made = yield from _made(kubectl, (*COMPANIONS, *runtimes, *jobs_of), run.name, run.uid, needed=needed)
            workloads = [workload for workload in workloads if workload.resource in made]
            companions, runtimes = (tuple(kind for kind in kinds if kind in made) for kinds in (COMPANIONS, runtimes))
        nodes: dict[int, Any] = {}
        with suppress(DdpctlError):
            nodes = (yield from self._pods(run)) if run.handle else {}
        errors = yield from save_nodes(run, kubectl, nodes)
        jobs = yield tuple(
            kubectl.run("delete", workload.resource, run.name, *quietly, f"--cascade={workload.cascade}")
            for workload in workloads
        )
        known = bool(run.handle or run.uid)
        if known:
            check(*jobs)
        if signal == "KILL":
            reader = [(reader_name(run.name, run.uid),)] if run.handle and holds(run.job, run.checkpoint_dir) else []
            pods = [("--selector", selector), *reader]
            check(*(yield tuple(kubectl.run("delete", "pods", *which, *quietly, "--grace-period=1") for which in pods)))
        beside = (",".join(companions), *runtimes) if companions else runtimes
        deleted = yield tuple(kubectl.run("delete", kind, run.name, *quietly) for kind in beside)
        check(*(answer for answer in (deleted if known else deleted[:1]) if not keeps_secrets(answer)))
        wait_s = KILL_WAIT_S if signal == "KILL" else int(run.job.stop_s) + STOP_MARGIN_S
        last = yield from save_logs(run, nodes, end_s=wait_s)
        lost = [f"node {node}: its log is lost: {one_line(last[node])}" for node in errors if node in last]
        if wait:
            gone = ("wait", "pods", "--for=delete", "--selector", selector, f"--timeout={wait_s}s")
            yield (Command(argv=(*kubectl.argv, *gone), timeout_s=wait_s + 10),)
        (pods_left,) = yield (replace(kubectl.get("pods", "--selector", selector), say="\n".join(lost)),)
        check(pods_left)
        return not items(pods_left)

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command in a node's container, or a shell if ``argv`` is empty. Return the exit code."""
        pods = yield from self._pods(run)
        if node not in pods:
            last = run.job.max_nodes - 1
            raise NoInputError(f"run '{run.name}' has no pod for node {node}: its nodes are 0 to {last}")
        kubectl, workload = kubectl_of(run.handle), workload_of(run.handle)
        options = ("--stdin", "--tty") if tty else ()
        argv = argv or ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
        name = pods[node]["metadata"]["name"]
        line = (*kubectl.argv, "exec", *options, name, "--container", workload.container, "--", *argv)
        (done,) = yield (Command(argv=line, mode="tty" if tty else "stream", timeout_s=None),)
        return done.returncode

    def suspend(self, run: Run, *, again: bool) -> Verb[None]:
        """Suspend the job, or resume it if ``again``.

        The pods of a suspended job save and end. A resumed job creates new pods.
        """
        kubectl, workload = kubectl_of(run.handle), workload_of(run.handle)
        gone = ConfigError(f"run '{run.name}' is no longer in the cluster: use ddpctl launch --resume {run.name}")
        spec, kinds = {"suspend": not again}, (workload.resource,)
        note = {"annotations": {SUSPENDED: None if again else "true"}}
        patch = json.dumps({"metadata": note, "spec": {workload.policy: spec} if workload.policy else spec})
        if again:
            (answer,) = yield (kubectl.get(f"{workload.resource}/{run.name}"),)
            if queue := next(map(waits_in_queue, items(answer)), ""):
                raise ConfigError(f"run '{run.name}' is waiting in the queue '{queue}', which starts it")
        if run.uid and not (yield from _made(kubectl, kinds, run.name, run.uid, needed=kinds)):
            raise gone
        (done,) = yield (kubectl.run("patch", workload.resource, run.name, "--type=merge", "--patch", patch),)
        if is_absent(done):
            raise gone
        check(done)

    def _pods(self, run: Run) -> Verb[dict[int, Any]]:
        (answer,) = yield (kubectl_of(run.handle).get("pods", "--selector", selector_of(run.name, run.uid)),)
        check(answer)
        return newest_pods(workload_of(run.handle), items(answer), master=self.options.master)


def _handle(kubectl: Kubectl, workload: Workload, run: str) -> dict[str, Any]:
    place = {"workload": workload.word, "context": kubectl.context, "namespace": kubectl.namespace}
    return {**place, "logs": f"ddpctl logs {run}"}


def _made(
    kubectl: Kubectl, kinds: Sequence[str], name: str, uid: str, *, needed: Sequence[str]
) -> Verb[tuple[str, ...]]:
    """Return the kinds of the objects that have this name and that the launch with this uid has created.

    Only objects of these ``kinds`` are queried, each by its name. A query by label would need the right to list
    Secrets. With this right, the user could read every Secret in the namespace.
    Raises DdpctlError if the query of a ``needed`` kind fails.
    """
    label = "jsonpath={.metadata.labels." + UID_LABEL.replace(".", r"\.") + "}"
    answers = yield tuple(kubectl.run("get", kind, name, "--ignore-not-found", "-o", label) for kind in kinds)
    seen = dict(zip(kinds, answers, strict=True))
    check(*(seen[kind] for kind in needed if not keeps_secrets(seen[kind])))
    whose = {kind: answer.stdout.strip() for kind, answer in seen.items() if answer.returncode == 0}
    return tuple(kind for kind, owner in whose.items() if uid and owner == uid)


def _run_name(thing: Mapping[str, Any]) -> str:
    return str(thing["metadata"].get("labels", {}).get(RUN_LABEL, ""))


def _pattern(run: Run, query: LogQuery) -> str | None:
    """Return a regular expression that matches the log lines of the requested ranks, or None for all lines."""
    # The character before the prefix may be the carriage return of a progress bar. If there is only one rank, its
    # lines have no prefix.
    if not query.ranks or run.job.world_size == 1:
        return None
    return rf"^([^ []+ )?.?\[node[0-9]+ rank({'|'.join(map(str, query.ranks))})\] "


# Notes for the user about a spec or a launch


def spec_notes(draft: Draft, operator: str) -> Iterator[str]:
    """Yield the comments at the beginning of a rendered spec: what the run needs, and notes for the user.

    ``operator``: the software that must be in the cluster to create the pods.
    """
    job, options = draft.plan.job, draft.options
    yield from (f"Needs {thing}." for thing in (operator, *_needs(draft)))
    if needs_project(job):
        script = one_line(script_of(job.command) or "the project")
        sent = "this file does not include it (ddpctl launch sends it as a ConfigMap)"
        yield f"The image must have {script} in {WORKSPACE}: {sent}."
    if job.secrets:
        kubectl = shlex.join(Kubectl(context=options.context, namespace=options.namespace).argv)
        pairs = " ".join(f'"{name}=${name}"' for name in job.secrets)
        created = f"{kubectl} create secret generic {draft.plan.name} --from-env-file=/dev/stdin"
        yield f"First: printf '%s\\n' {pairs} | {created}"
    yield from (f"Note: {line}." for line in _notes_on_pods(draft))


def _needs(draft: Draft) -> Iterator[str]:
    job, options, mounts = draft.plan.job, draft.options, mounts_of(draft.plan.job)
    yield f"the image {job.image}, in a registry that every machine can pull from"
    for mount in mounts:
        if mount.kind == "pvc":
            modes = "access mode ReadOnlyMany or ReadWriteMany" if mount.read_only else "access mode ReadWriteMany"
            mode = f", with {modes}" if job.max_nodes > 1 else ""
            yield f"the PersistentVolumeClaim '{mount.source}' (at {mount.path}){mode}"
    named = {
        "Secret": [mount.source for mount in mounts if mount.kind == "secret"],
        "ConfigMap": [mount.source for mount in mounts if mount.kind == "configmap"],
        "queue": [options.queue] if options.queue else [],
    }
    for kind, required in named.items():
        yield from (f"the {kind} '{name}'" for name in dict.fromkeys(required))
    if options.gang:
        yield "a gang scheduler. The operator's option --gang-scheduler-name must name it"


def launch_notes(draft: Draft, files: Mapping[str, str], left_out: Sequence[str]) -> Iterator[str]:
    """Yield notes about what a launch sends, and about its checkpoints and pods."""
    if files:
        size = sum(len(text.encode()) for text in files.values())
        yield f"sends {counted(len(files), 'file')}, {-(-size // 1000)} kB: {some(list(files), MOST_NAMES)}"
        yield f"{WORKSPACE} is read-only in the pods: a script can write to $DDP_RUN_DIR and /tmp"
    if left_out:
        names = some(left_out, MOST_NAMES)
        yield f"not sent, because their names suggest secrets: {names} (to send one, name it in the target's 'project')"
    yield from _notes_on_pods(draft)


def _notes_on_pods(draft: Draft) -> Iterator[str]:
    job = draft.plan.job
    if not holds(job, f"{RUNS}/{draft.plan.name}"):
        apart = ", and no node can read those of another, so after a restart the ranks may resume at different steps"
        more = apart if job.max_nodes > 1 else ""
        yield f"checkpoints are deleted with their pod{more}: to keep them, set mounts [pvc=CLAIM:{RUNS}]"
    paths = [one_line(mount.source) for mount in mounts_of(job) if mount.kind == "path"]
    if paths and draft.options.profile == "restricted":
        yield (
            f"{', '.join(paths)} {'is a path' if len(paths) == 1 else 'are paths'} on the machines, and Pod Security "
            "'restricted' does not allow such mounts: mount a PersistentVolumeClaim (pvc=NAME) instead"
        )
    if unlimited := [name for name, value in (("cpus", job.cpus), ("memory", job.memory)) if not value]:
        both = " and ".join(unlimited)
        yield f"the pods have no limit for {both}: set the job's {both} to limit them"


def bare_pod(draft: Draft, workload: Workload) -> Object:
    """Return the pod template as a Pod. The API server checks a Pod more strictly than the template in a job."""
    pod = workload.pod(draft)
    metadata = drop_empty({"name": f"{draft.plan.name}-probe", "namespace": draft.options.namespace}) | pod["metadata"]
    return manifest("v1", "Pod", metadata, spec={"restartPolicy": "OnFailure", **pod["spec"]})


def _prepare(
    plan: Plan, options: KubernetesOptions, environ: Mapping[str, str]
) -> Verb[tuple[Kubectl, Workload, Draft, list[Object], str]]:
    """Do everything that precedes the creation of objects.

    Return kubectl, the workload, the draft, the manifests of the objects that the job needs, and notes for the user.
    """
    kubectl = yield from find_cluster(options)
    options = replace(options, namespace=kubectl.namespace)
    workload, reason, unknown = yield from choose_workload(kubectl, options)
    files, left_out = yield from _read_project(plan, options)
    values = read_secrets(plan.job, environ)
    runtime = (yield from read_runtime(kubectl, options.runtime)) if options.runtime else {}
    draft = Draft(plan=plan, options=options, project=_keys(files), runtime=runtime)
    _check(draft, workload)
    # The cluster checks the objects without creating them. A TrainJob is not checked, because its webhook needs an
    # existing TrainingRuntime.
    judged = [bare_pod(draft, workload), *workload.before(draft), *_companions(draft)]
    if workload.word != "trainjob":
        judged.append(workload.job(draft))
    check(*(yield tuple(kubectl.create(dump((item,)), dry_run=True) for item in judged)))
    needed = [*_companions(draft), *workload.before(draft)]
    if files:
        needed.append(manifests.config_map(draft, files))
    needed.append(manifests.secret(draft, {**values, STORE_SECRET: token_hex(32)}))
    context = f" of context {kubectl.context}" if kubectl.context else ""
    base = f" on the runtime {options.runtime}" if options.runtime else ""
    where = f"a {workload.kind}{base} ({reason}) in namespace {kubectl.namespace or 'default'}{context}"
    delays = "" if workload.word == "pytorchjob" else DELAYS
    notes = filter(None, (where, unknown, *launch_notes(draft, files, left_out), delays))
    return kubectl, workload, draft, needed, "\n".join(notes)


def _check(draft: Draft, workload: Workload) -> None:
    wrong = [text for _, text in replace(draft.options, workload=workload.word).problems(draft.plan.job)]
    if name := name_problem(draft.plan.name, workload.word, draft.plan.job.max_nodes):
        wrong.append(f"the run's name {name}: choose a shorter --name")
    if wrong:
        raise ConfigError("\n".join(wrong))


def _companions(draft: Draft) -> tuple[Object, ...]:
    return (manifests.network_policy(draft),) if draft.options.network_policy else ()


def _make(kubectl: Kubectl, draft: Draft, workload: Workload, needed: list[Object]) -> Verb[bool]:
    """Create the ``needed`` objects and the job. The job becomes their owner, so that they are deleted with it.

    Return whether the Secret was created. If the user has no right to create it, raise an error only if the job has
    secrets.
    """
    answers = yield tuple(kubectl.create(dump((item,)), secret=item["kind"] == "Secret") for item in needed)
    has_secret = bool(draft.plan.job.secrets) or not keeps_secrets(answers[-1])
    check(*(answers if has_secret else answers[:-1]))
    job = workload.job(draft)
    for pause_s in (*RUNTIME_PAUSES_S, None):
        (made,) = yield (kubectl.create(dump((job,)), output="jsonpath={.metadata.uid}"),)
        if pause_s is None or NO_RUNTIME_YET not in made.stderr:
            break
        yield (Command(argv=("sleep", str(pause_s))),)
    check(made)
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": draft.plan.name, "uid": made.stdout.strip()}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    change = (draft.plan.name, "--type=merge", "--patch", patch)
    owned = needed if has_secret else needed[:-1]
    if owned:
        yield tuple(kubectl.run("patch", item["kind"].lower(), *change) for item in owned)
    return has_secret


def _read_project(plan: Plan, options: KubernetesOptions) -> Verb[tuple[Mapping[str, str], tuple[str, ...]]]:
    """Return the project files to send (path → text), and the files that are not sent because of their names.

    Return no files if the image contains the code. Raises ConfigError and NoInputError.
    """
    if not needs_project(plan.job) or not options.project:
        return {}, ()
    script = script_of(plan.job.command)
    path = re.sub(r"^(\./)+", "", script or "")
    named = (path,) if script else ()  # sent whatever its name is
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    (listed,) = yield (Command(argv=listing, cwd=plan.cwd, probe=True),)
    names = listed.stdout if listed.returncode == 0 else ""
    (read,) = yield (call(project.read, Path(plan.cwd), names, (*options.project, *named), probe=True),)
    read.check("project", ConfigError)
    if script and path not in read.value["files"]:
        to_do = "check that it exists and that git does not ignore it; if the image has it, set project: []"
        raise NoInputError(f"{script} is not sent from {plan.cwd}: {to_do}")
    return read.value["files"], tuple(read.value["left_out"])


def _keys(files: Mapping[str, str]) -> Mapping[str, str]:
    return {
        f"{number:03}-{re.sub('[^-._A-Za-z0-9]', '_', path.rpartition('/')[2])[:200]}": path
        for number, path in enumerate(files)
    }
