"""From a plan to a job in the cluster: judged first, by us and by the cluster itself, then made. Pure."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddpctl.command import Command, Verb
from ddpctl.errors import ConfigError, DdpctlError, NoInputError
from ddpctl.plan import Plan, script_of, title
from ddpctl.secrets import read_secrets
from ddpctl.targets import Submission
from ddpctl.targets.kubernetes import companions, remarks
from ddpctl.targets.kubernetes.answers import check
from ddpctl.targets.kubernetes.discovery import Choice, choose, find_cluster
from ddpctl.targets.kubernetes.kubectl import Kubectl
from ddpctl.targets.kubernetes.manifest import Object, dump
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import Draft, checkpoint_dir, needs_project
from ddpctl.targets.kubernetes.refusals import name_problem, problems
from ddpctl.targets.kubernetes.workloads import WORKLOADS, Workload


def render(plan: Plan, options: KubernetesOptions) -> str:
    """The manifests of a job that runs without ddpctl."""
    workload = WORKLOADS["pytorchjob" if options.workload == "auto" else options.workload]
    draft = Draft(plan=plan, options=options, project={})
    _refuse(draft, workload)
    lines = [f"# {title(plan.job)} on Kubernetes, as a {workload.kind}. Rendered by ddpctl render."]
    lines += [f"# {line}" for line in remarks.of_spec(draft, workload.operator)]
    return "\n".join(lines) + "\n" + dump((*_companions(draft), *workload.before(draft), workload.job(draft)))


def bare_pod(draft: Draft, workload: Workload) -> Object:
    """The pod template as a Pod: what the API server says of it, it does not say of the template in a job."""
    pod = workload.pod(draft)
    name = {"name": f"{draft.name}-probe", "namespace": draft.options.namespace}
    metadata = {**{key: value for key, value in name.items() if value}, **pod["metadata"]}
    spec = {"restartPolicy": "OnFailure", **pod["spec"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def submit(plan: Plan, options: KubernetesOptions) -> Verb[Submission]:
    """Look, judge, make; what cannot be made to the end is taken back."""
    try:
        return (yield from _submit(plan, options))
    except DdpctlError as error:
        error.nothing_started = True
        raise


def _submit(plan: Plan, options: KubernetesOptions) -> Verb[Submission]:
    kubectl = yield from find_cluster(options)
    options = replace(options, namespace=kubectl.namespace)
    choice = yield from choose(kubectl, options)
    files, left_out = yield from _read_project(plan, options)
    values = yield from read_secrets(plan.job)
    draft = Draft(plan=plan, options=options, project=_keys(files))
    _refuse(draft, choice.workload)
    yield from _judge(kubectl, draft, choice.workload)
    try:
        yield from _make(kubectl, draft, choice.workload, files, values)
    except DdpctlError:
        quietly = ("--ignore-not-found", "--wait=false")
        kinds = {one["kind"].lower() for one in (*_companions(draft), *choice.workload.before(draft))}
        kinds |= {"configmap"} if files else set()
        kinds |= {"secret"} if values else set()
        yield (kubectl.run("delete", ",".join(sorted(kinds)) or "configmap", draft.name, *quietly),)
        raise
    handle = {"workload": choice.workload.word, "context": kubectl.context, "namespace": kubectl.namespace}
    handle["logs"] = f"ddpctl logs {draft.name}"
    note = "; ".join((_where(kubectl, choice), *remarks.of_launch(draft, files, left_out)))
    return Submission(handle=handle, note=note, checkpoint_dir=checkpoint_dir(plan))


def _refuse(draft: Draft, workload: Workload) -> None:
    said = [text for _, text in problems(draft.plan.job, replace(draft.options, workload=workload.word))]
    if name := name_problem(draft.name, workload.word, draft.plan.job.max_nodes):
        said.append(f"the run's name {name}: choose a shorter --name")
    if said:
        raise ConfigError("\n".join(said))


def _companions(draft: Draft) -> tuple[Object, ...]:
    return (companions.network_policy(draft),) if draft.options.network_policy else ()


def _judge(kubectl: Kubectl, draft: Draft, workload: Workload) -> Verb[None]:
    """A TrainJob's own webhook wants its runtime to be there, so it is judged when it is made."""
    judged = [bare_pod(draft, workload), *workload.before(draft), *_companions(draft)]
    if workload.word != "trainjob":
        judged.append(workload.job(draft))
    answers = yield tuple(kubectl.create(dump((one,)), dry_run=True) for one in judged)
    check(*answers)


def _make(
    kubectl: Kubectl, draft: Draft, workload: Workload, files: Mapping[str, str], values: Mapping[str, str]
) -> Verb[None]:
    """What the job needs, then the job, then the job's name in what it needs, so that all go with it."""
    needed = [*_companions(draft), *workload.before(draft)]
    if files:
        needed.append(companions.config_map(draft, files))
    commands = [kubectl.create(dump((one,))) for one in needed]
    if values:
        secret = companions.secret(draft, values)
        needed.append(secret)
        commands.append(kubectl.create(dump((secret,)), secret=True))
    if commands:
        check(*(yield tuple(commands)))
    job = workload.job(draft)
    (made,) = yield (kubectl.create(dump((job,)), output="jsonpath={.metadata.uid}"),)
    check(made)
    owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": draft.name, "uid": made.stdout.strip()}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    if needed:
        yield tuple(
            kubectl.run("patch", one["kind"].lower(), draft.name, "--type=merge", "--patch", patch) for one in needed
        )


def _read_project(plan: Plan, options: KubernetesOptions) -> Verb[tuple[Mapping[str, str], tuple[str, ...]]]:
    """The project's files that go along, none where the image has the code; and those left out for their names."""
    if not needs_project(plan.job) or not options.project:
        return {}, ()
    script = script_of(plan.job.command)
    path = re.sub(r"^(\./)+", "", script or "")
    named = (path,) if script else ()  # whatever its name
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    (listed,) = yield (Command(argv=listing, cwd=plan.cwd, probe=True),)
    reader = (sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.project", *options.project, *named)
    names = listed.stdout if listed.returncode == 0 else ""
    (read,) = yield (Command(argv=reader, cwd=plan.cwd, stdin=names, probe=True),)
    if read.returncode:
        raise ConfigError(f"project: {read.stderr.strip().splitlines()[-1] if read.stderr.strip() else 'unreadable'}")
    found: Mapping[str, Any] = json.loads(read.stdout)
    if script and path not in found["files"]:
        raise NoInputError(
            f"{script}: not among the files that go along from {plan.cwd}: is it there, does git ignore it? "
            "An image that has it needs project: []"
        )
    return found["files"], tuple(found["left_out"])


def _keys(files: Mapping[str, str]) -> Mapping[str, str]:
    """A key of a ConfigMap for each file."""
    return {
        f"{number:03}-{re.sub('[^-._A-Za-z0-9]', '_', path.rpartition('/')[2])[:200]}": path
        for number, path in enumerate(files)
    }


def _where(kubectl: Kubectl, choice: Choice) -> str:
    context = f" of context {kubectl.context}" if kubectl.context else ""
    return f"a {choice.workload.kind} in namespace {kubectl.namespace or 'default'}{context} ({choice.why})"
