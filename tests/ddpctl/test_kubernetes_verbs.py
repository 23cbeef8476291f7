"""The target kubernetes: whole command lines against recorded answers of a real cluster, and what it says of each."""

import json
import sys
from dataclasses import replace

import pytest
import yaml
from tests.ddpctl.kubernetes_lab import DATA, JOB, OK, as_run, plan_of, play, recorded, run_of

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.run import RunStatus
from ddpctl.spec import JobSpec
from ddpctl.targets import LogQuery, Submission, Suspending
from ddpctl.targets.kubernetes import KubernetesOptions, KubernetesTarget

TARGET = KubernetesTarget(KubernetesOptions())
KUBECTL = "kubectl --context lab --namespace ml --request-timeout=30s"
VIEW = Output(
    returncode=0,
    stdout=json.dumps(
        {"current-context": "lab", "contexts": [{"name": "lab", "context": {"cluster": "c", "namespace": "ml"}}]}
    ),
)
PYTORCH = recorded("misc/raw-apis-kubeflow-v1")
ABSENT = recorded("misc/raw-apis-missing")
UID = Output(returncode=0, stdout="af8e18f3")
RUN = run_of()


def lines(commands: tuple[Command, ...]) -> list[str]:
    """Each command on one line: what it reads is told by its kinds."""
    return [shell_line(replace(command, stdin=None)) for command in commands]


def kinds(commands: tuple[Command, ...]) -> list[str]:
    return [thing["kind"] for command in commands for thing in yaml.safe_load_all(command.stdin or "")]


def submit(
    *answers: tuple[Output, ...], job: JobSpec = JOB, **options: object
) -> tuple[list[tuple[Command, ...]], Submission]:
    target = KubernetesTarget(KubernetesOptions(**options))  # type: ignore[arg-type]
    return play(target.submit(plan_of(job), attached=True), answers)


def test_submit_looks_judges_and_makes() -> None:
    asked, submission = submit((VIEW,), (PYTORCH, ABSENT), (OK, OK, OK), (OK,), (UID,), (OK,))
    view, apis, judged, needed, job, patched = asked
    assert lines(view) == ["kubectl config view --minify -o json"]
    assert lines(apis) == [
        f"{KUBECTL} get --raw /apis/kubeflow.org/v1",
        f"{KUBECTL} get --raw /apis/trainer.kubeflow.org/v1alpha1",
    ]
    assert {command.probe for command in (*view, *apis)} == {True}
    assert lines(judged) == [f"{KUBECTL} create --dry-run=server --validate=strict -o name -f -"] * 3
    assert kinds(judged) == ["Pod", "NetworkPolicy", "PyTorchJob"]
    assert lines(needed) == [f"{KUBECTL} create --validate=strict -o name -f -"]
    assert lines(job) == [f"{KUBECTL} create --validate=strict -o 'jsonpath={{.metadata.uid}}' -f -"]
    assert kinds(needed + job) == ["NetworkPolicy", "PyTorchJob"]
    owner = '{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "digits-otter", "uid": "af8e18f3"}'
    assert lines(patched) == [
        f"{KUBECTL} patch networkpolicy digits-otter --type=merge --patch "
        f'\'{{"metadata": {{"ownerReferences": [{owner}]}}}}\''
    ]
    assert submission == Submission(
        handle={"workload": "pytorchjob", "context": "lab", "namespace": "ml", "logs": "ddpctl logs digits-otter"},
        checkpoint_dir="/runs/digits-otter/checkpoints",
        note="a PyTorchJob in namespace ml of context lab (the cluster has Kubeflow's training-operator); "
        "checkpoints go with their pod: mounts [pvc=CLAIM:/runs] keeps them",
    )


TRAINER = Output(returncode=0, stdout='{"resources": [{"name": "trainjobs"}]}')


@pytest.mark.parametrize(
    ("apis", "schema", "kind", "why"),
    [
        ((PYTORCH, TRAINER), (), "PyTorchJob", "the cluster has Kubeflow's training-operator"),
        ((ABSENT, TRAINER), ('{"runtimePatches": {}}',), "TrainJob", "the cluster has Kubeflow Trainer"),
        (
            (ABSENT, TRAINER),
            ('{"podTemplateOverrides": {}}',),
            "Job",
            "the cluster's Kubeflow Trainer is older than 2.2",
        ),
        ((ABSENT, ABSENT), (), "Job", "the cluster has no operator of Kubeflow's"),
    ],
)
def test_the_workload_is_what_the_cluster_serves(apis, schema, kind, why) -> None:
    more = [(Output(returncode=0, stdout=text),) for text in schema]
    judged = (OK,) * (4 if kind == "Job" else 3)
    needed = (OK,) * (1 if kind == "PyTorchJob" else 2)
    asked, submission = submit((VIEW,), apis, *more, judged, needed, (UID,), needed)
    assert kinds(asked[-2]) == [kind]
    assert submission.note.startswith(f"a {kind} in namespace ml of context lab ({why}); ")


def test_what_was_said_is_not_asked() -> None:
    asked, submission = submit((VIEW,), (OK, OK, OK, OK), (OK, OK), (UID,), (OK, OK), workload="job", namespace="team")
    assert [kinds(step) for step in asked] == [
        [],
        ["Pod", "Service", "NetworkPolicy", "Job"],
        ["NetworkPolicy", "Service"],
        ["Job"],
        [],
    ]
    assert submission.handle == {
        "workload": "job",
        "context": "lab",
        "namespace": "team",
        "logs": "ddpctl logs digits-otter",
    }


def test_a_train_job_is_judged_when_its_runtime_is_there() -> None:
    asked, _ = submit((VIEW,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), workload="trainjob")
    assert [kinds(step) for step in asked[1:4]] == [
        ["Pod", "TrainingRuntime", "NetworkPolicy"],
        ["NetworkPolicy", "TrainingRuntime"],
        ["TrainJob"],
    ]


SECRET = replace(JOB, secrets=("TOKEN",), mounts=("pvc=ckpt:/runs",))


def test_a_secret_goes_through_stdin_alone() -> None:
    value = Output(returncode=0, stdout="c4nary\n")
    asked, submission = submit(
        (VIEW,), (value,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), job=SECRET, workload="pytorchjob"
    )
    assert lines(asked[1]) == ["printenv TOKEN"]
    seen = [command for step in asked for command in step if "c4nary" in shell_line(command)]
    assert seen == []
    (holder,) = [command for step in asked for command in step if "c4nary" in (command.stdin or "")]
    assert (holder.secret, kinds((holder,))) == (True, ["Secret"])
    env = yaml.safe_load(asked[4][0].stdin)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][
        0
    ]["env"]
    assert {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "digits-otter", "key": "TOKEN"}}} in env
    assert submission.note == "a PyTorchJob in namespace ml of context lab (as you said)"


def test_a_script_goes_along_with_the_files_it_needs() -> None:
    job = replace(JOB, command=("train.py", "--lr", "0.1"))
    listed = Output(returncode=0, stdout="train.py\0lib/model.py\0README.md\0")
    read = Output(returncode=0, stdout=json.dumps({"lib/model.py": "x = 1\n", "train.py": "import lib.model\n"}))
    asked, _ = submit(
        (VIEW,), (listed,), (read,), (OK, OK, OK), (OK, OK), (UID,), (OK, OK), job=job, workload="pytorchjob"
    )
    assert lines(asked[1]) == ["cd /project && git ls-files -z --cached --others --exclude-standard"]
    assert lines(asked[2]) == [
        f"cd /project && {sys.executable} -P -m ddpctl.targets.kubernetes.project "
        "'*.py' '*.yaml' '*.yml' '*.json' '*.toml' '*.txt'"
    ]
    assert asked[2][0].stdin == "train.py\0lib/model.py\0README.md\0"
    project = yaml.safe_load(asked[4][1].stdin)
    assert project["data"] == {"000-model.py": "x = 1\n", "001-train.py": "import lib.model\n"}
    spec = yaml.safe_load(asked[5][0].stdin)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert [volume["configMap"] for volume in spec["volumes"] if "configMap" in volume] == [
        {
            "name": "digits-otter",
            "items": [{"key": "000-model.py", "path": "lib/model.py"}, {"key": "001-train.py", "path": "train.py"}],
        }
    ]


def test_a_script_that_does_not_go_along_is_missed_before_anything_is_made() -> None:
    read = Output(returncode=0, stdout="{}")
    with pytest.raises(NoInputError) as error:
        submit((VIEW,), (OK,), (read,), job=replace(JOB, command=("train.py",)), workload="pytorchjob")
    assert str(error.value) == (
        "train.py: not among the files that go along from /project: is it there, does the target's 'project' name it, "
        "does git ignore it? An image that has it needs project: []"
    )


@pytest.mark.parametrize(
    ("answers", "kind", "message"),
    [
        ((Output(returncode=127, stderr="kubectl: not found"),), UnavailableError, "kubectl is not here: install it"),
        ((VIEW, (recorded("bad/api-unreachable-get"), ABSENT)), UnavailableError, "the cluster does not answer at"),
        ((VIEW, (PYTORCH, ABSENT), (recorded("bad/pod-restricted"), OK, OK)), ConfigError, "the namespace admits only"),
        (
            (VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/webhook-down"))),
            UnavailableError,
            "the operator's own check",
        ),
        (
            (VIEW, (PYTORCH, ABSENT), (OK, OK, recorded("bad/rbac-create"))),
            ConfigError,
            "you may not create pytorchjobs",
        ),
    ],
)
def test_what_the_cluster_refuses_is_said_before_anything_is_made(answers, kind, message) -> None:
    steps = tuple(answer if isinstance(answer, tuple) else (answer,) for answer in answers)
    with pytest.raises(kind) as error:
        submit(*steps)
    assert str(error.value).startswith(message)
    assert error.value.nothing_started


def test_a_job_that_cannot_be_made_takes_back_what_it_needs() -> None:
    verb = TARGET.submit(plan_of(), attached=True)
    next(verb)
    verb.send((VIEW,))
    verb.send((PYTORCH, ABSENT))
    verb.send((OK, OK, OK))
    verb.send((OK,))
    assert lines(verb.send((recorded("bad/already-exists"),))) == [
        f"{KUBECTL} delete networkpolicy digits-otter --ignore-not-found --wait=false"
    ]
    with pytest.raises(ConfigError) as error:
        verb.send((OK,))
    assert str(error.value) == "running is in the namespace already: choose another --name"


def test_a_name_that_no_service_takes_is_refused_here() -> None:
    target, plan = KubernetesTarget(KubernetesOptions(workload="pytorchjob")), plan_of(run="a" * 55)
    with pytest.raises(ConfigError) as error:
        play(target.submit(plan, attached=True), [(VIEW,)])
    assert str(error.value) == (
        f"the run's name '{'a' * 55}' has 55 characters: with the pods' own endings more than 63, "
        "which no Service takes: at most 54: choose a shorter --name"
    )


def status(*answers: tuple[Output, ...], now: float = 2000.0) -> tuple[list[tuple[Command, ...]], RunStatus]:
    asked, (state,) = play(TARGET.status((RUN,), now=now), answers)
    return asked, state


def test_status_asks_once_for_jobs_and_pods() -> None:
    job, pods = as_run("jobs/running", "digits-otter", "running"), as_run("pods/running", "digits-otter", "running")
    asked, state = status((job, pods))
    assert [line for step in asked for line in lines(step)] == [
        f"{KUBECTL} get pytorchjobs.kubeflow.org --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
        f"{KUBECTL} get pods --selector 'ddpctl.run in (digits-otter)' --ignore-not-found -o json",
    ]
    assert (state.state, state.message, state.code) == ("training", "2 of 2 pods running", None)
    assert [(report.alive, report.note) for report in state.nodes] == [
        (True, "digits-otter-worker-0: running"),
        (True, "digits-otter-worker-1: running"),
    ]


def test_status_asks_for_events_where_pods_do_not_say_why() -> None:
    job = as_run("jobs/quota-exceeded", "digits-otter", "overquota")
    pods = as_run("pods/quota-exceeded", "digits-otter", "overquota")
    asked, state = status((job, pods), (as_run("events/quota-exceeded-job", "digits-otter", "overquota"),))
    assert lines(asked[1]) == [
        f"{KUBECTL} get events --field-selector type=Warning,involvedObject.name=digits-otter "
        "--ignore-not-found -o json"
    ]
    assert state.message == (
        "1 of 2 pods running: the namespace's quota gpu is used up: requests.nvidia.com/gpu: 2 asked for, 2 used, "
        "2 allowed: ask for less, or wait for other jobs"
    )


def test_a_run_that_has_ended_has_no_node_that_goes_on() -> None:
    """The operator cleans running pods away when a job has ended; nobody is to wait for them."""
    job = as_run("jobs/failed-evicted", "digits-otter", "evicted2")
    _, state = status((job, as_run("pods/evicted", "digits-otter", "evicted2")))
    assert (state.state, state.code, state.alive, state.remains) == ("failed", 137, False, True)


def test_status_of_what_is_gone_and_of_a_cluster_that_does_not_answer() -> None:
    _, gone = status((OK, OK))
    assert (gone.state, gone.code) == ("stopped", 143)
    assert status((OK, OK), now=1005.0)[1].state == "starting"
    _, away = status((recorded("bad/api-unreachable-get"), OK))
    assert (away.state, away.ended, away.message) == (
        "unknown",
        False,
        "the cluster does not answer at 127.0.0.1:16999 (connection refused): is it up, is a VPN missing?",
    )
    interrupted = replace(RUN, handle={})
    _, (lost,) = play(TARGET.status((interrupted,), now=2000.0), [])
    assert lost.state == "lost"


PODS = as_run("pods/restarted-once", "digits-otter", "b-exit1-2")


def test_logs_of_nodes_and_ranks_also_from_before_a_restart() -> None:
    logs = "kubectl --context lab --namespace ml logs"
    asked, _ = play(TARGET.logs(RUN, LogQuery(tail=5)), [(PODS,), *[(OK,)] * 4])
    assert [line for step in asked for line in lines(step)] == [
        f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json",
        *(
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
        "sh -c 'only=$1; shift; \"$@\" | grep -E -e \"$only\" || true' sh '^\\[node[0-9]+ rank(2|3)\\] ' "
        f"{logs} digits-otter-worker-1 --container pytorch"
    ]


def test_logs_that_are_not_there() -> None:
    with pytest.raises(NoInputError) as error:
        play(TARGET.logs(RUN, LogQuery(ranks=(9,))), [])
    assert str(error.value) == "digits-otter has no such log: its nodes are 0 to 1, its ranks 0 to 3"
    suspended = as_run("jobs/suspended", "digits-otter", "susp1")
    with pytest.raises(NoInputError) as error:
        play(TARGET.logs(RUN, LogQuery()), [(OK,), (suspended, OK)])
    assert str(error.value) == (
        "digits-otter has no pod whose log could be read: suspended: it has no pods, and keeps its checkpoints; "
        "ddpctl resume digits-otter"
    )


def test_logs_of_pods_that_wait_say_what_for() -> None:
    pods = as_run("pods/pending-gpu", "digits-otter", "pend-gpu")
    with pytest.raises(NoInputError) as error:
        play(
            TARGET.logs(RUN, LogQuery()), [(pods,), (as_run("jobs/created-pending", "digits-otter", "pend-gpu"), pods)]
        )
    assert str(error.value) == (
        "digits-otter has no pod whose log could be read: digits-otter-worker-0: no machine has enough nvidia.com/gpu "
        "free: wait for one, or ask for less (0/2 nodes are available)"
    )


def test_logs_that_are_followed_are_a_program_of_their_own() -> None:
    ((follow,),), _ = play(TARGET.logs(RUN, LogQuery(follow=True, nodes=(1,), ranks=(3,))), [(OK,)])
    assert follow.argv[:4] == (sys.executable, "-P", "-m", "ddpctl.targets.kubernetes.follow")
    assert (follow.mode, follow.timeout_s) == ("stream", None)
    assert json.loads(follow.argv[4]) == {
        "run": "digits-otter",
        "nodes": 2,
        "created": 1000.0,
        "workload": "pytorchjob",
        "master": False,
        "context": "lab",
        "namespace": "ml",
        "only": r"^\[node[0-9]+ rank(3)\] ",
        "only_nodes": [1],
        "tail": None,
        "poll_s": 2.0,
    }


def test_stop_deletes_the_job_and_all_that_belongs_to_it() -> None:
    named = "digits-otter --ignore-not-found --wait=false"
    job = f"{KUBECTL} delete pytorchjobs.kubeflow.org {named} --cascade=foreground"
    rest = f"{KUBECTL} delete configmaps,secrets,services,networkpolicies.networking.k8s.io {named}"
    left = f"{KUBECTL} get pods --selector ddpctl.run=digits-otter --ignore-not-found -o json"
    wait = "kubectl --context lab --namespace ml wait pods --for=delete --selector ddpctl.run=digits-otter"
    asked, gone = play(TARGET.stop(RUN, kill=False), [(OK,), (OK,), (OK,), (OK,)])
    assert [line for step in asked for line in lines(step)] == [job, rest, f"{wait} --timeout=70s", left]
    assert gone
    asked, gone = play(TARGET.stop(RUN, kill=True), [(OK,), (OK,), (OK,), (OK,), (PODS,)])
    mine = "--selector ddpctl.run=digits-otter --ignore-not-found --wait=false"
    pods = f"{KUBECTL} delete pods {mine} --grace-period=1"
    assert [line for step in asked for line in lines(step)] == [job, pods, rest, f"{wait} --timeout=30s", left]
    assert not gone
    asked, gone = play(TARGET.stop(RUN, kill=False, wait=False), [(OK,), (OK,), (PODS,)])
    assert [len(step) for step in asked] == [1, 1, 1]
    with pytest.raises(DdpctlError) as error:
        play(TARGET.stop(RUN, kill=False), [(recorded("bad/rbac-delete"),)])
    assert str(error.value) == (
        "you may not delete pytorchjobs in the namespace ml: k8s/rbac.yaml is the Role that ddpctl needs"
    )


def test_stop_of_a_launch_that_was_interrupted_looks_for_all_that_it_may_have_made() -> None:
    broken = Output(returncode=1, stderr="error: the server doesn't have a resource type")
    asked, gone = play(
        TARGET.stop(replace(RUN, handle={}), kill=True), [(VIEW,), (OK, broken, OK), (OK,), (OK, broken), (OK,), (OK,)]
    )
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


def test_execute_in_a_nodes_container() -> None:
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
    assert str(error.value) == "digits-otter has no pod for node 2: its nodes are 0 to 1"


def test_suspend_and_resume() -> None:
    assert isinstance(TARGET, Suspending)
    patch = f"{KUBECTL} patch pytorchjobs.kubeflow.org digits-otter --type=merge --patch"
    ((suspend,),), _ = play(TARGET.suspend(RUN), [(recorded("misc/patch-suspend"),)])
    assert shell_line(suspend) == f'{patch} \'{{"spec":{{"runPolicy":{{"suspend":true}}}}}}\''
    ((resume,),), _ = play(TARGET.resume(run_of(workload="job")), [(OK,)])
    assert shell_line(resume) == (
        f'{KUBECTL} patch jobs.batch digits-otter --type=merge --patch \'{{"spec":{{"suspend":false}}}}\''
    )
    with pytest.raises(ConfigError) as error:
        play(TARGET.resume(RUN), [(recorded("bad/get-notfound"),)])
    assert str(error.value) == "digits-otter is not in the cluster any more: ddpctl launch --resume digits-otter"


def test_a_master_is_node_0() -> None:
    target = KubernetesTarget(KubernetesOptions(master=True))
    pods = as_run("pods/running-master-worker", "digits-otter", "running-a")
    (_, (command,)), _ = play(target.execute(RUN, node=1, argv=("ls",), tty=False), [(pods,), (OK,)])
    assert command.argv[6] == "digits-otter-worker-0"
    assert DATA.is_dir()
