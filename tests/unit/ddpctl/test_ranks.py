"""Ranks and GPUs of a node on every target, and what ddprun reads in every pod of every shape."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.messages import refused
from tests.unit.ddpctl import loading, ssh_answers
from tests.unit.ddpctl.answers import Answer, matching, perform
from tests.unit.ddpctl.kubernetes_lab import draft_of
from tests.unit.ddpctl.operator_environment import Pod, pods_of

from ddpctl.command import Output
from ddpctl.errors import ConfigError, UsageError
from ddpctl.job.launch_plan import Plan, unexpanded, unused_gpus
from ddpctl.job.spec import JobSpec
from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import KaggleTarget
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.pod import resources
from ddpctl.targets.local import LocalOptions, LocalTarget
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget
from ddprun.settings import node_config, options

JOB = JobSpec(name="digits", nodes="2", gpus=4, command=("train.py",))
EIGHT_GPUS = Output(returncode=0, stdout="".join(f"GPU-{index}\n" for index in range(8)))
PORT = Output(returncode=0, stdout='{"port": 40001}\n')
Asked = tuple[int | str, list[str]]  # the ranks of each node, and the GPUs that are asked for, in the target's words


def plan_of(job: JobSpec) -> Plan:
    return Plan(name="night", job=job, cwd="/project", folder="/runs/night", checkpoint_dir="/runs/night/checkpoints")


def ranks_of(values: list[str]) -> int | str:
    (only,) = set(values)
    return int(only) if only.isdecimal() else only


def local_nodes(job: JobSpec) -> list[tuple[str, str]]:
    """The number of ranks and the GPUs of each node."""
    verb = LocalTarget(LocalOptions(python="/python"), {}).submit(plan_of(job), attached=True)
    answers: dict[str, Answer] = {"nodectl gpus": EIGHT_GPUS, "ddprun.nodectl port": PORT}
    nodes = [command.env for command in matching(perform(verb, answers)[0], "ddprun --grace")]
    return [(env["PET_NPROC_PER_NODE"], env["CUDA_VISIBLE_DEVICES"]) for env in nodes]


def local(job: JobSpec) -> Asked:
    ranks, gpus = zip(*local_nodes(job), strict=True)
    return ranks_of([*ranks]), [*gpus]


def local_script(job: JobSpec) -> Asked:
    text = LocalTarget(LocalOptions()).render(plan_of(job))
    ranks = re.findall(r"PET_NPROC_PER_NODE=(\S+)", text)
    return ranks_of(ranks), re.findall(r"_ddp_counts=\(.*\)", text)


def ssh(job: JobSpec) -> Asked:
    has = [ssh_answers.facts(number, gpu=tuple(f"GPU-{index}" for index in range(4))) for number in (1, 2)]
    commands, _ = ssh_answers.submit(*has, plan=plan_of(replace(job, command=("ddptrain",), image="ddpctl:1")))
    starts = "".join(command.stdin or "" for command in matching(commands, ssh_answers.START))
    return ranks_of(re.findall("PET_NPROC_PER_NODE=(.*)", starts)), re.findall("--gpus=[^']*", starts)


def slurm(job: JobSpec) -> Asked:
    text = SlurmTarget(SlurmOptions()).render(plan_of(job))
    return ranks_of(re.findall(r"_ddp_ranks=(\S+)", text)), re.findall("--gpus-per-node=.*", text)


def kubernetes(workload: str) -> Callable[[JobSpec], Asked]:
    def asked(job: JobSpec) -> Asked:
        draft = draft_of(job, KubernetesOptions(workload=workload))  # type: ignore[arg-type]
        pods = pods_of(draft, workload)
        read = [node_config.read_config(options.parse(pod.args), pod.env, lambda _: 0) for pod in pods]
        whole = resources(draft.plan.job, draft.options)
        gpus = [whole[part]["nvidia.com/gpu"] for part in ("requests", "limits")]
        return ranks_of([str(config.local_world_size) for config in read]), gpus

    return asked


def kaggle(job: JobSpec) -> Asked:
    plan = plan_of(replace(job, nodes="1", command=("ddptrain",)))
    target = KaggleTarget(KaggleOptions(owner="ann", accelerator="FourGpus", wheel="none"))
    text = target.render(plan)
    (call,) = re.findall(r"launch\('ddptrain', ([^)]*)\)", text)
    return re.sub(r", args=args|, name='night'", "", call), re.findall(r"gpus = \d+", text)


SHARES = ["GPU-0,GPU-1,GPU-2,GPU-3", "GPU-4,GPU-5,GPU-6,GPU-7"]
TABLE: dict[str, tuple[Callable[[JobSpec], Asked], Callable[[int | None], int | str], list[str]]] = {
    "local": (local, lambda ranks: ranks or 4, SHARES),
    "local script": (local_script, lambda ranks: ranks or "${_ddp_counts[_ddp_node]}", ["_ddp_counts=(4 4)"]),
    "ssh": (ssh, lambda ranks: ranks or 4, ['--gpus="device=GPU-0,GPU-1,GPU-2,GPU-3"'] * 2),
    "slurm": (slurm, lambda ranks: ranks or "${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-4}}", ["--gpus-per-node=4"]),
    "pytorchjob": (kubernetes("pytorchjob"), lambda ranks: ranks or 4, ["4", "4"]),
    "trainjob": (kubernetes("trainjob"), lambda ranks: ranks or 4, ["4", "4"]),
    "job": (kubernetes("job"), lambda ranks: ranks or 4, ["4", "4"]),
    "kaggle": (kaggle, lambda ranks: f"gpus=gpus, ranks={ranks}" if ranks else "gpus=gpus", ["gpus = 4"]),
}


@pytest.mark.parametrize("ranks", [1, 2, None])
@pytest.mark.parametrize("target", TABLE)
def test_the_ranks_are_started_and_the_gpus_asked_for(target: str, ranks: int | None) -> None:
    request, expected_ranks, gpus = TABLE[target]
    assert request(replace(JOB, ranks=ranks)) == (expected_ranks(ranks), gpus)


@pytest.mark.parametrize(
    ("text", "flags", "fact"),
    [
        (None, {"gpus": "4", "ranks": "3"}, "--ranks: gpus (4)"),
        (None, {"ranks": "3", "device": "cpu"}, "set gpus to 3"),
        ("job:\n  gpus: 4\n  ranks: 8\n", {}, "ddpctl.yaml:3:10: ranks: gpus (4)"),
        (None, {"ranks": "0"}, "--ranks: 0"),
    ],
    ids=["flags", "on a CPU", "file", "none"],
)
def test_ranks_that_do_not_divide_the_gpus(
    text: str | None, flags: dict[str, str], fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(ConfigError if text else UsageError, fact):
        loading.load(text, **flags)


def test_gpus_that_our_own_trainer_does_not_use_are_named() -> None:
    assert "1 of the 4 GPUs" in unused_gpus(replace(JOB, ranks=1, command=()))


@pytest.mark.parametrize(
    ("value", "warns"),
    [
        ("/x:$LD_LIBRARY_PATH", True),
        ("~/lib", True),
        ("a$", False),
    ],
)
def test_a_value_that_only_a_shell_would_expand_is_named(value: str, *, warns: bool) -> None:
    warning = unexpanded(replace(JOB, env={"LD_LIBRARY_PATH": value, "OTHER": "1"}))
    assert ("LD_LIBRARY_PATH" in warning, "OTHER" in warning) == (warns, False)


@pytest.mark.parametrize(
    ("argument", "named"),
    [("$LR", "$LR"), ("--out=secret99/${OUT}/$RUN", "${OUT}, $RUN"), ("^a$", ""), ("$1", ""), ("$(HOSTNAME)", "")],
)
def test_an_argument_that_only_a_shell_would_expand_is_named(argument: str, named: str) -> None:
    warning = unexpanded(replace(JOB, command=("train.py", "--lr", argument)))
    assert warning == (f"command: {named}: no shell expands $ and ~: write the whole value" if named else "")


PODS = JobSpec(name="digits", nodes="3", gpus=4, command=("train.py", "--note", "$(HOSTNAME) $$"), time_limit="12h")
ELASTIC_PODS = replace(PODS, nodes="2:3")


def read(pod: Pod) -> node_config.NodeConfig:
    return node_config.read_config(options.parse(pod.args), pod.env, {"gpu": 8, "cpu": 2}.__getitem__)


@pytest.mark.parametrize(
    ("word", "job", "given", "master", "port"),
    [
        ("pytorchjob", PODS, {}, "digits-otter-worker-0", 23456),
        ("pytorchjob", PODS, {"master": True}, "digits-otter-master-0", 23456),
        ("trainjob", PODS, {}, "digits-otter-node-0-0.digits-otter", 29500),
        ("trainjob", ELASTIC_PODS, {}, "digits-otter-node-0-0.digits-otter", 29500),
        ("job", PODS, {}, "digits-otter-0.digits-otter", 23456),
        ("job", ELASTIC_PODS, {}, "digits-otter-0.digits-otter", 23456),
    ],
)
def test_every_pod_has_its_node_rank_and_settings(
    word: str, job: JobSpec, given: dict[str, bool], master: str, port: int
) -> None:
    pods = pods_of(draft_of(job, KubernetesOptions(workload=word, **given)), word)  # type: ignore[arg-type]
    configs = [read(pod) for pod in pods]
    assert [config.node_rank for config in configs] == [0, 1, 2]
    assert master in pods[0].names
    join_timeout_s = 600.0 if word == "pytorchjob" else 1200.0  # a Job delays new pods
    for config in configs:
        assert (config.master_addr, config.master_port, config.local_world_size) == (master, port, 4)
        assert (config.min_nodes, config.max_nodes) == (job.min_nodes, 3)
        assert config.command[-3:] == ("train.py", "--note", "$(HOSTNAME) $$")
        assert (config.run_id, str(config.run_dir)) == ("digits-otter", "/runs/digits-otter")
        assert config.checkpoint_dir == "/runs/digits-otter/checkpoints"
        assert (config.retries_network, config.join_timeout_s, config.metrics_port) == (True, join_timeout_s, 9500)
        assert config.deadline is not None
        assert config.deadline.at == 12 * 3600  # from 0, which is now here


def test_the_only_pod_of_each_workload_is_node_0() -> None:
    alone = replace(PODS, nodes="1")
    for word in ("pytorchjob", "trainjob", "job"):
        (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload=word)), word)  # type: ignore[arg-type]
        assert (read(pod).node_rank, read(pod).max_nodes) == (0, 1)
    (pod,) = pods_of(draft_of(alone, KubernetesOptions(workload="pytorchjob", master=True)), "pytorchjob")
    assert (pod.name, read(pod).node_rank) == ("digits-otter-master-0", 0)


def test_each_node_gets_its_own_number_of_gpus_and_ranks() -> None:
    job = replace(JOB, nodes="3", gpus=(4, 1, 2))
    assert [[*job.ranks_on(node)] for node in range(3)] == [[0, 1, 2, 3], [4], [5, 6]]
    assert local_nodes(job) == [("4", "GPU-0,GPU-1,GPU-2,GPU-3"), ("1", "GPU-4"), ("2", "GPU-5,GPU-6")]
    assert "_ddp_counts=(4 1 2)" in LocalTarget(LocalOptions()).render(plan_of(job))


def test_ssh_hosts_have_their_own_numbers_of_gpus() -> None:
    has = [ssh_answers.facts(1, gpu=("GPU-a", "GPU-b", "GPU-c")), ssh_answers.facts(2, gpu=("GPU-d",))]
    job = replace(JOB, gpus=(3, 1), command=("ddptrain",), image="ddpctl:1")
    commands, _ = ssh_answers.submit(*has, plan=plan_of(job))
    starts = [command.stdin or "" for command in matching(commands, ssh_answers.START)]
    assert [re.findall(r"PET_NPROC_PER_NODE=(\d)", start)[0] for start in starts] == ["3", "1"]
    with refused(ConfigError, "box2", "1 GPU", "2", code=78):
        ssh_answers.submit(*has, plan=plan_of(replace(job, gpus=(2, 2))))


@pytest.mark.parametrize(
    ("job", "key"),
    [({"nodes": "2", "gpus": (4, 4, 2)}, "job.gpus"), ({"nodes": "2", "gpus": (4, 3), "ranks": 2}, "job.ranks")],
)
def test_numbers_that_do_not_fit_the_nodes_are_refused(job: Mapping[str, Any], key: str) -> None:
    assert [problem for problem, _ in JobSpec(**job).problems()] == [key]
