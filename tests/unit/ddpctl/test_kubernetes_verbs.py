"""The other verbs of the target kubernetes: whole command lines, and what it says of a real cluster's answers."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.kubernetes_lab import DATA, KUBECTL, OK, VIEW, as_run, lines, play, recorded, run_of
from tests.wording import Wording

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.launcher import AppContext, Stopper
from ddpctl.run_status import RunStatus
from ddpctl.targets import LogQuery
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget

TARGET = KubernetesTarget(KubernetesOptions())
RUN = run_of()


def status(*answers: tuple[Output, ...], now: float = 2000.0) -> tuple[list[tuple[Command, ...]], RunStatus]:
    asked, (state,) = play(TARGET.status((RUN,), now=now), answers)
    return asked, state


def test_status_asks_once_for_jobs_and_pods(wording: Wording) -> None:
    job, pods = as_run("jobs/running", "digits-otter", "running"), as_run("pods/running", "digits-otter", "running")
    asked, state = status((job, pods))
    assert [line for step in asked for line in lines(step)] == [
        f"{KUBECTL} get pytorchjobs.kubeflow.org --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
        f"{KUBECTL} get pods --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
    ]
    assert (state.state, state.code) == ("running", None)
    wording(state.message)
    assert [(report.alive, report.note) for report in state.nodes] == [
        (True, "digits-otter-worker-0: running"),
        (True, "digits-otter-worker-1: running"),
    ]


def test_status_asks_for_events_where_pods_do_not_say_why(wording: Wording) -> None:
    job = as_run("jobs/quota-exceeded", "digits-otter", "overquota")
    pods = as_run("pods/quota-exceeded", "digits-otter", "overquota")
    asked, state = status((job, pods), (as_run("events/quota-exceeded-job", "digits-otter", "overquota"),))
    assert lines(asked[1]) == [
        f"{KUBECTL} get events --field-selector type=Warning,involvedObject.name=digits-otter "
        "--ignore-not-found -o json"
    ]
    wording(state.message)


def test_a_run_that_has_ended_has_no_node_that_goes_on() -> None:
    """The operator cleans running pods away when a job has ended; nobody is to wait for them."""
    job = as_run("jobs/failed-evicted", "digits-otter", "evicted2")
    _, state = status((job, as_run("pods/evicted", "digits-otter", "evicted2")))
    assert (state.state, state.code, state.alive, state.remains) == ("failed", 137, False, True)
    assert (state.has_logs, state.has_files) == (True, False)
    kept = replace(
        RUN, job=replace(RUN.job, mounts=("pvc=runs:/runs",)), checkpoint_dir="/runs/digits-otter/checkpoints"
    )
    _, (state,) = play(TARGET.status((kept,), now=2000.0), [(job, OK)])
    assert (state.has_logs, state.has_files) == (False, True)


def test_status_of_what_is_gone_and_of_a_cluster_that_does_not_answer(wording: Wording) -> None:
    _, gone = status((OK, OK))
    assert (gone.state, gone.code, gone.has_logs, gone.has_files) == ("lost", None, False, False)
    assert status((OK, OK), now=1005.0)[1].state == "starting"
    _, away = status((recorded("bad/api-unreachable-get"), OK))
    assert (away.state, away.ended) == ("unknown", False)
    wording(away.message)
    interrupted = replace(RUN, handle={})
    _, (lost,) = play(TARGET.status((interrupted,), now=2000.0), [])
    assert lost.state == "lost"


FILTER = 'sh -c \'how=$1 only=$2; shift 2; "$@" | grep "$how" -e "$only" || true\' sh'
PODS = as_run("pods/restarted-once", "digits-otter", "b-exit1-2")


def test_logs_of_nodes_and_ranks_also_from_before_a_restart() -> None:
    logs = "kubectl --context lab --namespace ml logs"
    asked, _ = play(TARGET.logs(RUN, LogQuery(tail=5)), [(PODS,), *[(OK,)] * 4])
    assert [line for step in asked for line in lines(step)] == [
        f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json",
        *(
            f"{FILTER} -vE '^([^ []+ )?\\[node[0-9]+\\] ddprun-record ' "
            f"{logs} digits-otter-worker-{node} --container pytorch --tail 5{previous}"
            for node in (0, 1)
            for previous in (" --previous", "")
        ),
    ]
    (_, one), _ = play(
        TARGET.logs(RUN, LogQuery(nodes=(1,), ranks=(2, 3))),
        [(as_run("pods/running", "digits-otter", "running"),), (OK,)],
    )
    assert lines(one) == [
        f"{FILTER} -E '^([^ []+ )?.?\\[node[0-9]+ rank(2|3)\\] ' {logs} digits-otter-worker-1 --container pytorch"
    ]
    (_, timed, _), _ = play(TARGET.logs(RUN, LogQuery(nodes=(1,), timestamps=True)), [(PODS,), *[(OK,)] * 2])
    assert lines(timed)[0].endswith("digits-otter-worker-1 --container pytorch --timestamps --previous")


def test_logs_that_are_not_there(wording: Wording) -> None:
    with pytest.raises(NoInputError) as error:
        play(TARGET.logs(RUN, LogQuery(ranks=(9,))), [])
    wording(error.value)
    suspended = as_run("jobs/suspended", "digits-otter", "susp1")
    with pytest.raises(NoInputError) as error:
        play(TARGET.logs(RUN, LogQuery()), [(OK,), (suspended, OK)])
    wording(error.value)


def test_logs_of_pods_that_wait_name_the_reason(wording: Wording) -> None:
    pods = as_run("pods/pending-gpu", "digits-otter", "pend-gpu")
    with pytest.raises(NoInputError) as error:
        play(
            TARGET.logs(RUN, LogQuery()), [(pods,), (as_run("jobs/created-pending", "digits-otter", "pend-gpu"), pods)]
        )
    wording(error.value)


def test_logs_that_are_followed_are_a_program_of_their_own() -> None:
    ((follow,),), _ = play(TARGET.logs(RUN, LogQuery(follow=True, nodes=(1,), ranks=(3,))), [(OK,)])
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


def test_stop_deletes_the_job_and_all_that_belongs_to_it(wording: Wording) -> None:
    named = "digits-otter --ignore-not-found --wait=false"
    job = f"{KUBECTL} delete pytorchjobs.kubeflow.org {named} --cascade=foreground"
    rest = f"{KUBECTL} delete configmaps,secrets,services,networkpolicies.networking.k8s.io {named}"
    left = f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json"
    wait = "kubectl --context lab --namespace ml wait pods --for=delete --selector ddpctl.run=digits-otter"
    asked, gone = play(TARGET.stop(RUN, signal="TERM"), [(OK,), (OK,), (OK,), (OK,)])
    assert [line for step in asked for line in lines(step)] == [job, rest, f"{wait} --timeout=70s", left]
    assert gone
    asked, gone = play(TARGET.stop(RUN, signal="KILL"), [(OK,), (OK,), (OK,), (OK,), (PODS,)])
    mine = "--selector ddpctl.run=digits-otter --ignore-not-found --wait=false"
    pods = f"{KUBECTL} delete pods {mine} --grace-period=1"
    assert [line for step in asked for line in lines(step)] == [job, pods, rest, f"{wait} --timeout=30s", left]
    assert not gone
    asked, gone = play(TARGET.stop(RUN, signal="TERM", wait=False), [(OK,), (OK,), (PODS,)])
    assert [len(step) for step in asked] == [1, 1, 1]
    with pytest.raises(DdpctlError) as error:
        play(TARGET.stop(RUN, signal="TERM"), [(recorded("bad/rbac-delete"),)])
    wording(error.value)


def test_stop_of_a_train_job_leaves_its_runtime_until_the_job_is_gone() -> None:
    run = replace(RUN, handle={**RUN.handle, "workload": "trainjob"})
    asked, _ = play(TARGET.stop(run, signal="TERM"), [(OK,), (OK, OK), (OK,), (OK,)])
    named = "digits-otter --ignore-not-found --wait=false"
    assert lines(asked[0]) == [f"{KUBECTL} delete trainjobs.trainer.kubeflow.org {named} --cascade=background"]
    assert lines(asked[1])[1] == f"{KUBECTL} delete trainingruntimes.trainer.kubeflow.org {named}"


def test_ctrl_c_is_a_sigterm_and_says_so(wording: Wording) -> None:
    asked, said = [], []

    class Recorder:
        def perform(self, verb: Any) -> bool:
            (command,) = next(verb)
            asked.append(shell_line(command))
            return True

    recorder: Any = Recorder()
    stopper = Stopper(AppContext(executor=recorder, root=Path("/runs"), emit=said.append), RUN, first="INT")
    stopper()
    assert len(asked) == len(said) == 1
    assert " delete pytorchjobs.kubeflow.org digits-otter " in asked[0]
    wording(said[0])


def test_stop_of_a_launch_that_was_interrupted_looks_for_all_that_it_may_have_made() -> None:
    broken = Output(returncode=1, stderr="error: the server doesn't have a resource type")
    answers = [(VIEW,), (OK, broken, OK), (OK,), (OK, broken), (OK,), (OK,)]
    asked, gone = play(TARGET.stop(replace(RUN, handle={}), signal="KILL"), answers)
    assert [command.argv[7] for command in asked[1]] == [
        "pytorchjobs.kubeflow.org",
        "trainjobs.trainer.kubeflow.org",
        "jobs.batch",
    ]
    assert [command.argv[7].split(",")[0] for command in asked[3]] == [
        "configmaps",
        "trainingruntimes.trainer.kubeflow.org",
    ]
    assert gone


def test_stop_of_a_launch_that_was_interrupted_deletes_what_has_its_uid() -> None:
    unserved = Output(returncode=1, stderr="error: the server doesn't have a resource type")
    mine, other = Output(returncode=0, stdout="4c1f5a1e2b3d"), Output(returncode=0, stdout="f00dfeed0000")
    no_right = Output(
        returncode=1, stderr='Error from server (Forbidden): cannot get resource "secrets" in API group ""'
    )
    run = replace(RUN, handle={}, uid=mine.stdout, job=replace(RUN.job, mounts=("pvc=runs:/runs",)))
    run = replace(run, checkpoint_dir="/runs/digits-otter/checkpoints")
    named = "digits-otter --ignore-not-found"
    selector = f"ddpctl.run=digits-otter,ddpctl.uid={run.uid}"
    wait = f"kubectl --context lab --namespace ml wait pods --for=delete --selector {selector} --timeout=30s"
    left = f"{KUBECTL} get pods --selector {selector} --ignore-not-found -o json"
    pods = f"{KUBECTL} delete pods --selector {selector} --ignore-not-found --wait=false --grace-period=1"
    kinds = ("configmaps", "secrets", "services", "networkpolicies.networking.k8s.io")
    kinds += ("trainingruntimes.trainer.kubeflow.org", "pytorchjobs.kubeflow.org")
    kinds += ("trainjobs.trainer.kubeflow.org", "jobs.batch")

    seen = (mine, no_right, other, mine, unserved, other, unserved, mine)
    asked, gone = play(TARGET.stop(run, signal="KILL"), [(VIEW,), seen, (OK,), (OK,), (OK,), (OK,), (OK,)])
    label = "'jsonpath={.metadata.labels.ddpctl\\.uid}'"
    assert lines(asked[1]) == [f"{KUBECTL} get {kind} {named} -o {label}" for kind in kinds]
    assert [line for step in asked[2:] for line in lines(step)] == [
        f"{KUBECTL} delete jobs.batch {named} --wait=false --cascade=foreground",
        pods,
        f"{KUBECTL} delete configmaps,networkpolicies.networking.k8s.io {named} --wait=false",
        wait,
        left,
    ]
    assert gone

    seen = (OK, no_right, OK, OK, mine, unserved, mine, other)
    asked, _ = play(TARGET.stop(run, signal="KILL"), [(VIEW,), seen, (OK,), (OK,), (OK,), (OK,), (OK,)])
    assert lines(asked[2] + asked[4]) == [
        f"{KUBECTL} delete trainjobs.trainer.kubeflow.org {named} --wait=false --cascade=background",
        f"{KUBECTL} delete trainingruntimes.trainer.kubeflow.org {named} --wait=false",
    ]

    asked, gone = play(TARGET.stop(run, signal="KILL"), [(VIEW,), (OK,) * 8, (), (OK,), (), (OK,), (OK,)])
    assert [line for step in asked[2:] for line in lines(step)] == [pods, wait, left]
    away = (recorded("bad/api-unreachable-get"),) * 8
    with pytest.raises(UnavailableError):
        play(TARGET.stop(run, signal="KILL"), [(VIEW,), away])


def test_execute_in_a_nodes_container(wording: Wording) -> None:
    pods = as_run("pods/running", "digits-otter", "running")
    (_, (command,)), code = play(
        TARGET.execute(RUN, node=1, argv=("nvidia-smi", "-L"), tty=False), [(pods,), (Output(returncode=3),)]
    )
    assert shell_line(command) == (
        "kubectl --context lab --namespace ml exec digits-otter-worker-1 --container pytorch -- nvidia-smi -L"
    )
    assert (command.mode, code) == ("stream", 3)
    (_, (command,)), _ = play(TARGET.execute(RUN, node=0, argv=("bash",), tty=True), [(pods,), (OK,)])
    assert shell_line(command) == (
        "kubectl --context lab --namespace ml exec --stdin --tty digits-otter-worker-0 --container pytorch -- bash"
    )
    assert command.mode == "tty"
    (_, (command,)), _ = play(TARGET.execute(RUN, node=0, argv=(), tty=True), [(pods,), (OK,)])
    assert command.argv[-3:] == ("sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
    with pytest.raises(NoInputError) as error:
        play(TARGET.execute(RUN, node=2, argv=("ls",), tty=False), [(pods,)])
    wording(error.value)


def test_suspend_and_resume(wording: Wording) -> None:
    assert "suspend" in TARGET.capabilities
    patch = f"{KUBECTL} patch pytorchjobs.kubeflow.org digits-otter --type=merge --patch"
    ((suspend,),), _ = play(TARGET.suspend(RUN, again=False), [(recorded("misc/patch-suspend"),)])
    assert shell_line(suspend) == f'{patch} \'{{"spec":{{"runPolicy":{{"suspend":true}}}}}}\''
    ((resume,),), _ = play(TARGET.suspend(run_of(workload="job"), again=True), [(OK,)])
    assert shell_line(resume) == (
        f'{KUBECTL} patch jobs.batch digits-otter --type=merge --patch \'{{"spec":{{"suspend":false}}}}\''
    )
    with pytest.raises(ConfigError) as error:
        play(TARGET.suspend(RUN, again=True), [(recorded("bad/get-notfound"),)])
    wording(error.value)


def test_what_another_launch_has_made_under_the_same_name_is_left_alone() -> None:
    run, theirs = replace(RUN, uid="4c1f5a1e2b3d"), Output(returncode=0, stdout="f00dfeed0000")
    selector = f"ddpctl.run=digits-otter,ddpctl.uid={run.uid}"
    job, pods = (as_run(f"{kind}/running", "digits-otter", "running") for kind in ("jobs", "pods"))
    for uid, state in ((theirs.stdout, "lost"), (run.uid, "running")):
        labelled = tuple(
            replace(one, stdout=one.stdout.replace('"ddpctl.run":', f'"ddpctl.uid": "{uid}", "ddpctl.run":'))
            for one in (job, pods)
        )
        _, (found,) = play(TARGET.status((run,), now=2000.0), [labelled])
        assert found.state == state
    asked, gone = play(TARGET.stop(run, signal="KILL"), [(theirs,) * 5, (), (OK,), (), (OK,), (OK,)])
    assert [line.partition(" delete ")[2] for step in asked for line in lines(step) if " delete " in line] == [
        f"pods --selector {selector} --ignore-not-found --wait=false --grace-period=1"
    ]
    assert gone
    with pytest.raises(ConfigError):
        play(TARGET.suspend(run, again=False), [(theirs,)])
    (asked, *_), _ = play(TARGET.execute(run, node=0, argv=("ls",), tty=False), [(pods,), (OK,)])
    assert selector in lines(asked)[0]


def test_a_master_is_node_0() -> None:
    target = KubernetesTarget(KubernetesOptions(master=True))
    pods = as_run("pods/running-master-worker", "digits-otter", "running-a")
    (_, (command,)), _ = play(target.execute(RUN, node=1, argv=("ls",), tty=False), [(pods,), (OK,)])
    assert command.argv[6] == "digits-otter-worker-0"
    assert DATA.is_dir()
