"""The other verbs of the target kubernetes: whole command lines, and what it reports of a real cluster's answers."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.messages import assert_names, refused
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.kubernetes_lab import KUBECTL, as_run, cluster, lines, recorded, run_of

from ddpctl.command import Command, Output
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import Probe
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget
from ddpwire.run_files import Outcome, termination_message

TARGET = KubernetesTarget(KubernetesOptions())
RUN = run_of()
UID, OTHER_UID = (Output(returncode=0, stdout=text) for text in ("4c1f5a1e2b3d", "f00dfeed0000"))
UNREACHABLE = recorded("bad/api-unreachable-get")
UNSERVED = Output(returncode=1, stderr="error: the server doesn't have a resource type")
GET_JOB, GET_PODS, GET_EVENTS, OF_LABEL = "get pytorchjobs", "get pods", "get events", "labels.ddpctl"
RESTARTED = as_run("pods/restarted-once", "digits-otter", "b-exit1-2")
RUNNING = as_run("pods/running", "digits-otter", "running")
KEPT = replace(RUN, job=replace(RUN.job, mounts=("pvc=runs:/runs",)), checkpoint_dir="/runs/digits-otter/checkpoints")


def status(answers: Mapping[str, Answer], *, run: Run = RUN, now: float = 2000.0) -> tuple[list[Command], RunStatus]:
    commands, (state,) = perform(TARGET.status((run,), now=now), answers)
    return commands, state


def test_status_asks_once_for_jobs_and_pods() -> None:
    pods = json.loads(RUNNING.stdout)
    replaced = {**pods["items"][0]["metadata"], "name": "replaced", "creationTimestamp": "2000-01-01T00:00:00Z"}
    pods["items"].append({**pods["items"][0], "metadata": replaced})
    job = as_run("jobs/running", "digits-otter", "running")
    commands, state = status({GET_JOB: job, GET_PODS: replace(RUNNING, stdout=json.dumps(pods))})
    assert lines(commands) == [
        f"{KUBECTL} get pytorchjobs.kubeflow.org --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
        f"{KUBECTL} get pods --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
    ]
    assert (state.state, state.code) == ("running", None)
    assert "2 of 2" in state.message
    assert [(report.alive, report.note) for report in state.nodes] == [
        (True, "digits-otter-worker-0: running"),
        (True, "digits-otter-worker-1: running"),
    ]


def test_status_asks_for_events_where_pods_do_not_explain_their_state() -> None:
    kinds = {GET_JOB: "jobs/quota-exceeded", GET_PODS: "pods/quota-exceeded", GET_EVENTS: "events/quota-exceeded-job"}
    commands, state = status({part: as_run(path, "digits-otter", "overquota") for part, path in kinds.items()})
    assert lines(commands[2:]) == [
        f"{KUBECTL} get events --field-selector type=Warning,involvedObject.name=digits-otter "
        "--ignore-not-found -o json"
    ]
    assert state.state == "rendezvous"
    assert_names(state.message, "requested: requests.nvidia.com/gpu=2", "limited: requests.nvidia.com/gpu=2")


def test_a_run_that_has_ended_has_no_node_that_is_alive() -> None:
    """The operator cleans running pods away when a job has ended; nobody is to wait for them."""
    job, pods = (as_run(path, "digits-otter", "evicted2") for path in ("jobs/failed-evicted", "pods/evicted"))
    _, state = status({GET_JOB: job, GET_PODS: pods})
    assert (state.state, state.code, state.alive, state.remains) == ("failed", 137, False, True)
    assert (state.has_logs, state.has_files) == (True, False)
    _, state = status({GET_JOB: job}, run=KEPT)
    assert (state.has_logs, state.has_files) == (False, True)


def with_outcomes(output: Output, *outcomes: Outcome, **metadata: Any) -> Output:
    """The answer, in which the containers have ended with these outcomes in turn."""
    answer = json.loads(output.stdout)
    for pod, outcome in zip(answer["items"], itertools.cycle(outcomes), strict=False):
        pod["metadata"] |= metadata
        for container in pod["status"]["containerStatuses"]:
            container["state"] = {"terminated": {"exitCode": 75, "message": termination_message(outcome)}}
    return replace(output, stdout=json.dumps(answer))


def test_the_cause_of_a_failed_job_is_its_outcome_even_while_pods_are_deleted() -> None:
    message = "rank 1 on node 0 ran out of memory and was killed: 2 GiB. A restart did not help"
    outcome = Outcome(code=137, cause="oom", message=message, node=0, rank=1, attempt=2)
    job = as_run("jobs/failed-exitcode", "digits-otter", "failcode")
    lost = Outcome(code=137, cause="node_lost", message="node 1 was lost", node=1)
    deleted = {"deletionTimestamp": "2026-11-20T09:01:00Z", "deletionGracePeriodSeconds": 60}
    _, state = status({GET_JOB: job, GET_PODS: with_outcomes(RUNNING, lost, outcome, **deleted)})
    assert (state.state, state.code, state.outcome) == ("failed", 137, outcome)
    assert_names(state.message, "rank 1 on node 0", "2 GiB")


@pytest.mark.parametrize(
    ("run", "answers", "now", "state"),
    [
        (RUN, {}, 2000.0, "lost"),
        (RUN, {}, 1005.0, "starting"),
        (RUN, {GET_JOB: UNREACHABLE}, 2000.0, "unknown"),
        (replace(RUN, handle={}), {}, 2000.0, "lost"),
    ],
    ids=["gone", "young", "unreachable", "interrupted launch"],
)
def test_the_state_of_a_run_without_objects(run: Run, answers: dict[str, Answer], now: float, state: str) -> None:
    _, status_ = status(answers, run=run, now=now)
    assert (status_.state, status_.ended) == (state, state == "lost")
    if state == "lost":
        assert (status_.has_logs, status_.has_files) == (False, False)
    if state == "unknown":
        assert "127.0.0.1:16999" in status_.message


FILTER = 'sh -c \'how=$1 only=$2; shift 2; "$@" | grep "$how" -e "$only" || true\' sh'


def test_logs_of_a_restarted_container_begin_before_the_restart() -> None:
    logs = "kubectl --context lab --namespace ml logs"
    commands, _ = perform(TARGET.logs(RUN, LogQuery(tail=5)), {GET_PODS: RESTARTED})
    assert lines(commands) == [
        f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json",
        *(
            f"{FILTER} -vE '^([^ []+ )?\\[node[0-9]+\\] ddprun-record ' "
            f"{logs} digits-otter-worker-{node} --container pytorch --tail 5{previous}"
            for node in (0, 1)
            for previous in (" --previous", "")
        ),
    ]
    commands, _ = perform(TARGET.logs(RUN, LogQuery(nodes=(1,), timestamps=True)), {GET_PODS: RESTARTED})
    assert lines(commands)[1].endswith("digits-otter-worker-1 --container pytorch --timestamps --previous")


def test_logs_of_a_node_and_of_ranks_are_filtered_by_their_prefix() -> None:
    commands, _ = perform(TARGET.logs(RUN, LogQuery(nodes=(1,), ranks=(2, 3))), {GET_PODS: RUNNING})
    assert lines(commands[1:]) == [
        f"{FILTER} -E '^([^ []+ )?.?\\[node[0-9]+ rank(2|3)\\] ' "
        "kubectl --context lab --namespace ml logs digits-otter-worker-1 --container pytorch"
    ]
    alone = replace(RUN, job=replace(RUN.job, nodes="1", gpus=1))  # its lines have no prefix
    commands, _ = perform(TARGET.logs(alone, LogQuery(ranks=(0,))), {GET_PODS: RUNNING})
    assert lines(commands[1:])[0].startswith(f"{FILTER} -vE ")
    commands = []
    for query in (LogQuery(ranks=(9,)), LogQuery(nodes=(2,))):
        with refused(NoInputError, "digits-otter", "0 to 1", "0 to 3"):
            perform(TARGET.logs(RUN, query), {}, commands)
    assert commands == []


def test_a_pod_that_reads_a_claim_is_deleted_before_and_after_a_pull_and_a_log_is_read_from_its_end() -> None:
    commands: list[Command] = []
    with refused(UnavailableError, "digits-otter-pull"):
        perform(TARGET.pull(KEPT, "/out"), {"wait pod/": Output(returncode=1, stderr="timed out")}, commands)
    assert [" delete pod " in line for line in lines(commands)] == [False, True, False, False, True]
    ended = as_run("pods/succeeded", "digits-otter", "succeeded")
    commands, _ = perform(TARGET.probe(RUN, Probe()), {GET_PODS: ended})
    assert [line.endswith("--tail=2000") for line in lines(matching(commands, " logs "))] == [True, True]


NAMED = "digits-otter --ignore-not-found --wait=false"
DELETE_JOB = f"{KUBECTL} delete pytorchjobs.kubeflow.org {NAMED} --cascade=foreground"
DELETE_REST = f"{KUBECTL} delete configmaps,secrets,services,networkpolicies.networking.k8s.io {NAMED}"
LIST_PODS = f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json"
AWAIT = "kubectl --context lab --namespace ml wait pods --for=delete --selector ddpctl.run=digits-otter"


def test_stop_deletes_the_job_and_all_that_belongs_to_it_and_waits_for_its_grace() -> None:
    commands, gone = perform(TARGET.stop(RUN, signal="TERM"), {})
    assert lines(commands) == [LIST_PODS, DELETE_JOB, DELETE_REST, f"{AWAIT} --timeout=70s", LIST_PODS]
    assert gone


def test_stop_with_kill_deletes_the_pods_and_reports_those_that_remain() -> None:
    commands, gone = perform(TARGET.stop(RUN, signal="KILL"), {GET_PODS: RESTARTED})
    selected = "--selector ddpctl.run=digits-otter --ignore-not-found --wait=false"
    pods = f"{KUBECTL} delete pods {selected} --grace-period=1"
    assert lines(matching(commands, " delete ")) == [DELETE_JOB, pods, DELETE_REST]
    assert lines(commands[-2:]) == [f"{AWAIT} --timeout=30s", LIST_PODS]
    assert not gone
    commands, gone = perform(TARGET.stop(RUN, signal="TERM", wait=False), {GET_PODS: RESTARTED})
    assert (matching(commands, " wait "), gone) == ([], False)


def test_stop_saves_the_logs_before_it_deletes_anything_and_again_when_the_pods_have_ended() -> None:
    answers = {GET_PODS: RUNNING, " logs ": Output(returncode=0, stdout="2026-11-20T09:00:00.1Z [node0] ready\n")}
    commands, _ = perform(TARGET.stop(RUN, signal="TERM", wait=False), answers)
    logs = matching(commands, " logs ")
    follow = [line.endswith("--timestamps --follow") for line in lines(logs)]
    assert follow == [False, False, True, True]
    assert [command.timeout_s for command in logs] == [15.0, 15.0, 70.0, 70.0]
    steps = [commands.index(logs[1]), commands.index(only(commands, DELETE_JOB)), commands.index(logs[2])]
    assert steps == sorted(steps)
    run, nodes = matching(commands, "kubernetes.files")[-1].call.args
    assert (run, nodes[1]) == (RUN, {"node.log": "2026-11-20T09:00:00.1Z [node0] ready\n"})
    commands, _ = perform(TARGET.stop(RUN, signal="TERM", wait=False), {GET_PODS: RESTARTED})
    last = lines(matching(commands, " logs "))[-4:]
    assert [line.partition("--timestamps ")[2] for line in last] == ["--previous", "--follow"] * 2


def test_a_stop_without_the_right_names_the_role_and_a_resume_of_what_is_gone_names_the_launch() -> None:
    with refused(ConfigError, "k8s/rbac.yaml"):
        perform(TARGET.stop(RUN, signal="TERM"), {" delete ": recorded("bad/rbac-delete")})
    perform(TARGET.stop(RUN, signal="TERM"), {"delete configmaps,secrets": NO_RIGHT})  # its run had no Secret
    with refused(ConfigError, "ddpctl launch --resume digits-otter"):
        perform(TARGET.suspend(RUN, again=True), {" patch ": recorded("bad/get-notfound")})


INTERRUPTED = replace(KEPT, handle={}, uid=UID.stdout)
SELECTOR = f"ddpctl.run=digits-otter,ddpctl.uid={UID.stdout}"
DELETE_PODS = f"{KUBECTL} delete pods --selector {SELECTOR} --ignore-not-found --wait=false --grace-period=1"
NO_RIGHT = Output(returncode=1, stderr='Error from server (Forbidden): cannot get resource "secrets" in API group ""')
KINDS = ("configmaps", "secrets", "services", "networkpolicies.networking.k8s.io")
KINDS += ("trainingruntimes.trainer.kubeflow.org", "pytorchjobs.kubeflow.org")
KINDS += ("trainjobs.trainer.kubeflow.org", "jobs.batch")


@pytest.mark.parametrize(
    ("labels", "deletes"),
    [
        (
            {"configmaps": UID, "services": OTHER_UID, "networkpolicies": UID, "trainingruntimes": UNSERVED,
             "pytorchjobs": OTHER_UID, "trainjobs": UNSERVED, "jobs.batch": UID},
            [f"{KUBECTL} delete jobs.batch {NAMED} --cascade=foreground", DELETE_PODS,
             f"{KUBECTL} delete configmaps,networkpolicies.networking.k8s.io {NAMED}"],
        ),
        (
            {"trainingruntimes": UID, "pytorchjobs": UNSERVED, "trainjobs": UID, "jobs.batch": OTHER_UID},
            [f"{KUBECTL} delete trainjobs.trainer.kubeflow.org {NAMED} --cascade=background", DELETE_PODS,
             f"{KUBECTL} delete trainingruntimes.trainer.kubeflow.org {NAMED}"],
        ),
        ({}, [DELETE_PODS]),
    ],
    ids=["a job", "a train job", "nothing"],
)  # fmt: skip
def test_stop_of_an_interrupted_launch_deletes_only_what_has_its_uid(
    labels: dict[str, Output], deletes: list[str]
) -> None:
    answers: dict[str, Answer] = {f"get {kind}": output for kind, output in labels.items()}
    answers |= {"get secrets": NO_RIGHT} if labels else {}
    commands, gone = perform(TARGET.stop(INTERRUPTED, signal="KILL"), cluster(answers))
    label = "'jsonpath={.metadata.labels.ddpctl\\.uid}'"
    assert lines(matching(commands, OF_LABEL)) == [
        f"{KUBECTL} get {kind} digits-otter --ignore-not-found -o {label}" for kind in KINDS
    ]
    assert lines(matching(commands, " delete ")) == deletes
    assert lines(commands[-2:]) == [
        f"kubectl --context lab --namespace ml wait pods --for=delete --selector {SELECTOR} --timeout=30s",
        f"{KUBECTL} get pods --selector {SELECTOR} --ignore-not-found -o json",
    ]
    assert gone


def test_stop_of_an_interrupted_launch_deletes_nothing_while_the_cluster_does_not_answer() -> None:
    commands: list[Command] = []
    with pytest.raises(UnavailableError):
        perform(TARGET.stop(INTERRUPTED, signal="KILL"), cluster({OF_LABEL: UNREACHABLE}), commands)
    assert matching(commands, " delete ") == []


def in_queue(**annotations: str) -> Output:
    """A suspended job that has the label of a queue of Kueue."""
    output = as_run("jobs/suspended", "digits-otter", "susp1")
    answer = json.loads(output.stdout)
    for job in answer.get("items", [answer]):
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
        job["metadata"]["annotations"] = annotations
        job["spec"]["runPolicy"]["suspend"] = True
    return replace(output, stdout=json.dumps(answer))


@pytest.mark.parametrize(
    ("annotations", "suspended"),
    [({}, "pending"), ({"ddpctl.suspended": "true"}, "suspended")],
    ids=["by its queue", "by a user"],
)
def test_a_job_that_a_user_has_suspended_is_resumed_and_one_of_its_queue_is_not(
    annotations: dict[str, str], suspended: str
) -> None:
    job = in_queue(**annotations)
    assert status({GET_JOB: job, GET_PODS: RUNNING})[1].state == "stopping", "until its pods have ended"
    assert status({GET_JOB: job})[1].state == suspended
    commands: list[Command] = []
    if annotations:
        perform(TARGET.suspend(RUN, again=True), {GET_JOB: job}, commands)
        assert '"ddpctl.suspended": null' in lines(commands)[-1]
        assert '"ddpctl.suspended": "true"' in lines(perform(TARGET.suspend(RUN, again=False), {})[0])[-1]
    else:
        assert_names(status({GET_JOB: job})[1].message, "gpus")
        with refused(ConfigError, "gpus"):
            perform(TARGET.suspend(RUN, again=True), {GET_JOB: job}, commands)
    assert len(matching(commands, " patch ")) == len(annotations)


def test_a_pod_of_a_job_that_has_failed_does_not_start_again() -> None:
    outcome = Outcome(code=3, cause="error", message="rank 1 on node 0 exited with 3", node=0, rank=1)
    pods = as_run("pods/running", "digits-otter", "running")
    job = as_run("jobs/failed-exitcode", "digits-otter", "failcode")
    _, state = status({GET_JOB: job, GET_PODS: with_outcomes(pods, outcome)})
    assert state.state == "failed"
    assert [report.note for report in state.nodes] == [
        f"digits-otter-worker-{node}: exit code 3: {outcome.message}" for node in (0, 1)
    ]


@pytest.mark.parametrize(("uid", "state"), [(OTHER_UID.stdout, "lost"), (UID.stdout, "running")])
def test_status_reads_no_objects_of_another_launch_with_the_same_name(uid: str, state: str) -> None:
    job, pods = (
        replace(output, stdout=output.stdout.replace('"ddpctl.run":', f'"ddpctl.uid": "{uid}", "ddpctl.run":'))
        for output in (as_run("jobs/running", "digits-otter", "running"), RUNNING)
    )
    assert status({GET_JOB: job, GET_PODS: pods}, run=replace(RUN, uid=UID.stdout))[1].state == state


def test_no_verb_touches_objects_of_another_launch_with_the_same_name() -> None:
    run = replace(RUN, uid=UID.stdout)
    commands, gone = perform(TARGET.stop(run, signal="KILL"), {OF_LABEL: OTHER_UID})
    assert (lines(matching(commands, " delete ")), gone) == ([DELETE_PODS], True)
    commands = []
    with pytest.raises(ConfigError):
        perform(TARGET.suspend(run, again=False), {OF_LABEL: OTHER_UID}, commands)
    assert matching(commands, " patch ") == []
    commands, _ = perform(TARGET.execute(run, node=0, argv=("ls",), tty=False), {GET_PODS: RUNNING})
    assert SELECTOR in lines(commands)[0]
