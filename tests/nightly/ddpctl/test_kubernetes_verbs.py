"""Verbs of the target kubernetes on other workloads and in rarer states."""

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.kubernetes_lab import KUBECTL, as_run, cluster, lines, run_of
from tests.unit.ddpctl.test_kubernetes_verbs import (
    DELETE_JOB,
    GET_JOB,
    GET_PODS,
    NAMED,
    RUN,
    RUNNING,
    TARGET,
    UNSERVED,
)

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import NoInputError
from ddpctl.operations.launcher import AppContext, Stopper
from ddpctl.targets import LogQuery
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.status import report
from ddpctl.targets.kubernetes.target import KubernetesTarget
from ddpwire.run_files import Outcome, read_outcome, termination_message


def test_a_termination_message_has_room_for_a_long_outcome() -> None:
    long = Outcome(code=75, cause="gave_up", message='the Wörter "x\\y" ' * 500, node=1, rank=3, step=7)
    text = termination_message(long)
    assert len(text.encode()) <= 4096
    outcome = read_outcome(text)
    assert (outcome.code, outcome.rank, outcome.step) == (75, 3, 7)
    assert long.message.startswith(outcome.message)
    assert len(outcome.message) > 1000


def test_followed_logs_are_a_program_of_their_own() -> None:
    (follow,), _ = perform(TARGET.logs(RUN, LogQuery(follow=True, nodes=(1,), ranks=(3,))), {})
    assert follow.argv[:4] == (sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.log_follower")
    assert (follow.mode, follow.timeout_s) == ("stream", None)
    assert json.loads(follow.argv[4]) == {
        "only": r"^([^ []+ )?.?\[node[0-9]+ rank(3)\] ",
        "only_nodes": [1],
        "tail": None,
        "folder": "/state/digits-otter",
        "replace_lost": False,
        "timestamps": False,
        "poll_s": 2.0,
        "unreachable_s": 120.0,
    }


def test_stop_reports_the_logs_that_are_lost() -> None:
    lost = Output(returncode=1, stderr='Error from server: Get "https://10.0.0.7:10250": dial tcp: i/o timeout\n')
    answers = {GET_PODS: RUNNING, "logs digits-otter-worker-1": lost}
    commands, _ = perform(TARGET.stop(RUN, signal="TERM", wait=False), answers)
    assert_names(commands[-1].say, "node 1", "i/o timeout")
    assert "node 0" not in commands[-1].say


def test_stop_of_a_train_job_leaves_its_runtime_until_the_job_is_gone() -> None:
    commands, _ = perform(TARGET.stop(run_of(workload="trainjob"), signal="TERM"), {})
    job, _, runtime = lines(matching(commands, " delete "))
    assert job == f"{KUBECTL} delete trainjobs.trainer.kubeflow.org {NAMED} --cascade=background"
    assert runtime == f"{KUBECTL} delete trainingruntimes.trainer.kubeflow.org {NAMED}"


def test_stop_of_an_interrupted_launch_looks_for_all_that_it_may_have_created() -> None:
    answers = {"trainjobs.trainer": UNSERVED, "trainingruntimes": UNSERVED}
    commands, gone = perform(TARGET.stop(replace(RUN, handle={}), signal="KILL"), cluster(answers))
    assert [command.argv[7].split(",")[0] for command in matching(commands, " delete ")] == [
        "pytorchjobs.kubeflow.org",
        "trainjobs.trainer.kubeflow.org",
        "jobs.batch",
        "pods",
        "configmaps",
        "trainingruntimes.trainer.kubeflow.org",
    ]
    assert gone


def test_exec_on_a_node_without_a_pod_names_the_nodes() -> None:
    with pytest.raises(NoInputError) as error:
        perform(TARGET.execute(RUN, node=2, argv=("ls",), tty=False), {GET_PODS: RUNNING})
    assert all(fact in str(error.value) for fact in ("digits-otter", "node 2", "0 to 1"))


def test_a_master_is_node_0() -> None:
    target = KubernetesTarget(KubernetesOptions(master=True))
    pods = as_run("pods/running-master-worker", "digits-otter", "running-a")
    commands, _ = perform(target.execute(RUN, node=1, argv=("ls",), tty=False), {GET_PODS: pods})
    assert only(commands, EXEC).argv[6] == "digits-otter-worker-0"


@pytest.mark.parametrize(
    ("counts", "after_s", "fact"),
    [
        ((0, 0), 3, "in 7 s"),
        ((1, 2), 3, "in 77 s"),
        ((40, 0), 3, "in 597 s"),
        ((0, 0), 60, "is replacing"),
        ((), 3, ""),
    ],
)
@pytest.mark.parametrize("code", [143, 1])
def test_status_shows_when_the_job_controller_replaces_a_pod(
    counts: tuple[int, ...], after_s: float, fact: str, code: int
) -> None:
    fact = fact if code == 143 else ""  # the script's own error ends the job
    names = ("batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count")
    pod = {
        "metadata": {
            "name": "night-1-x",
            "annotations": dict(zip(names, map(str, counts), strict=False)),
            "deletionTimestamp": "2026-11-20T09:01:00Z",
        },
        "status": {
            "phase": "Failed",
            "containerStatuses": [
                {"name": "main", "state": {"terminated": {"exitCode": code, "finishedAt": "2026-11-20T09:00:00Z"}}}
            ],
        },
    }
    now = datetime(2026, 11, 20, 9, tzinfo=UTC).timestamp() + after_s
    text = report(pod, "main", now=now).message
    assert (fact in text) if fact else "replac" not in text
    del pod["metadata"]["deletionTimestamp"]
    text = report(pod, "main", now=now).message
    assert (fact in text) if fact else "replac" not in text


@pytest.mark.parametrize(
    ("answers", "fact"),
    [
        ({GET_JOB: as_run("jobs/suspended", "digits-otter", "susp1")}, "ddpctl resume digits-otter"),
        (
            {
                GET_JOB: as_run("jobs/created-pending", "digits-otter", "pend-gpu"),
                GET_PODS: as_run("pods/pending-gpu", "digits-otter", "pend-gpu"),
            },
            "digits-otter-worker-0: no machine can run it: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu",
        ),
    ],
    ids=["suspended", "pending"],
)
def test_logs_that_do_not_exist_yet_give_the_state_as_the_reason(answers: dict[str, Answer], fact: str) -> None:
    with pytest.raises(NoInputError) as error:
        perform(TARGET.logs(RUN, LogQuery()), answers)
    assert fact in str(error.value)


def test_ctrl_c_deletes_the_job_and_reports_a_sigterm() -> None:
    commands: list[Command] = []
    messages: list[str] = []

    class Recorder:
        def perform(self, verb: Any) -> Any:
            return perform(verb, {}, commands)[1]

    recorder: Any = Recorder()
    stopper = Stopper(AppContext(executor=recorder, root=Path("/runs"), emit=messages.append), RUN, first="INT")
    stopper()
    assert DELETE_JOB in lines(commands)
    (message,) = messages
    assert all(fact in message for fact in ("digits-otter", "SIGTERM", "30 s"))


EXEC = "kubectl --context lab --namespace ml exec"


@pytest.mark.parametrize(
    ("node", "argv", "tty", "line"),
    [
        (1, ("nvidia-smi", "-L"), False, f"{EXEC} digits-otter-worker-1 --container pytorch -- nvidia-smi -L"),
        (0, ("bash",), True, f"{EXEC} --stdin --tty digits-otter-worker-0 --container pytorch -- bash"),
        (
            0, (), True,
            f"{EXEC} --stdin --tty digits-otter-worker-0 --container pytorch -- "
            "sh -c 'command -v bash >/dev/null && exec bash; exec sh'",
        ),
    ],
    ids=["command", "terminal", "no command"],
)  # fmt: skip
def test_exec_runs_in_a_nodes_container_and_has_its_exit_code(
    node: int, argv: tuple[str, ...], tty: bool, line: str
) -> None:
    answers = {GET_PODS: RUNNING, " exec ": Output(returncode=3)}
    commands, code = perform(TARGET.execute(RUN, node=node, argv=argv, tty=tty), answers)
    command = only(commands, EXEC)
    assert (shell_line(command), command.mode, code) == (line, "tty" if tty else "stream", 3)


@pytest.mark.parametrize(
    ("workload", "again", "resource", "patch"),
    [
        ("pytorchjob", False, "pytorchjobs.kubeflow.org", {"runPolicy": {"suspend": True}}),
        ("job", True, "jobs.batch", {"suspend": False}),
    ],
)
def test_suspend_and_resume_patch_the_job(workload: str, resource: str, patch: dict[str, Any], *, again: bool) -> None:
    assert "suspend" in TARGET.capabilities
    commands, _ = perform(TARGET.suspend(run_of(workload=workload), again=again), {})
    command = commands[-1]
    assert command.argv[6:10] == ("patch", resource, "digits-otter", "--type=merge")
    note = {"annotations": {"ddpctl.suspended": None if again else "true"}}
    assert json.loads(command.argv[-1]) == {"metadata": note, "spec": patch}
