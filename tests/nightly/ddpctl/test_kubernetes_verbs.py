"""Verbs of the target kubernetes on other workloads and in rarer states."""

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.answers import matching, only, perform
from tests.unit.ddpctl.kubernetes_lab import KUBECTL, as_run, cluster, lines, run_of
from tests.unit.ddpctl.test_kubernetes_verbs import (
    EXEC,
    GET_PODS,
    NAMED,
    RUN,
    RUNNING,
    TARGET,
    UNSERVED,
)

from ddpctl.command import Output
from ddpctl.errors import NoInputError
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
    asked, _ = perform(TARGET.stop(RUN, signal="TERM", wait=False), answers)
    assert_names(asked[-1].say, "node 1", "i/o timeout")
    assert "node 0" not in asked[-1].say


def test_stop_of_a_train_job_leaves_its_runtime_until_the_job_is_gone() -> None:
    asked, _ = perform(TARGET.stop(run_of(workload="trainjob"), signal="TERM"), {})
    job, _, runtime = lines(matching(asked, " delete "))
    assert job == f"{KUBECTL} delete trainjobs.trainer.kubeflow.org {NAMED} --cascade=background"
    assert runtime == f"{KUBECTL} delete trainingruntimes.trainer.kubeflow.org {NAMED}"


def test_stop_of_an_interrupted_launch_looks_for_all_that_it_may_have_created() -> None:
    answers = {"trainjobs.trainer": UNSERVED, "trainingruntimes": UNSERVED}
    asked, gone = perform(TARGET.stop(replace(RUN, handle={}), signal="KILL"), cluster(answers))
    assert [command.argv[7].split(",")[0] for command in matching(asked, " delete ")] == [
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
    asked, _ = perform(target.execute(RUN, node=1, argv=("ls",), tty=False), {GET_PODS: pods})
    assert only(asked, EXEC).argv[6] == "digits-otter-worker-0"


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
def test_status_shows_when_the_job_controller_replaces_a_pod(
    counts: tuple[int, ...], after_s: float, fact: str
) -> None:
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
                {"name": "main", "state": {"terminated": {"exitCode": 143, "finishedAt": "2026-11-20T09:00:00Z"}}}
            ],
        },
    }
    now = datetime(2026, 11, 20, 9, tzinfo=UTC).timestamp() + after_s
    text = report(pod, "main", now=now).words
    assert (fact in text) if fact else "replac" not in text
    del pod["metadata"]["deletionTimestamp"]
    text = report(pod, "main", now=now).words
    assert (fact in text) if fact else "replac" not in text
