"""The option ``runtime``: a run takes over the fields of a runtime that the cluster has."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import yaml
from tests.messages import assert_names, refused
from tests.unit.ddpctl.answers import matching, only, perform
from tests.unit.ddpctl.kubernetes_judges import faults
from tests.unit.ddpctl.kubernetes_lab import JOB, KUBECTL, VIEW, draft_of, lines, plan_of

from ddpctl.command import Command, Output
from ddpctl.errors import ConfigError, DdpctlError
from ddpctl.job.spec import JobSpec
from ddpctl.targets.kubernetes import target
from ddpctl.targets.kubernetes.manifests import WORKLOADS
from ddpctl.targets.kubernetes.options import KubernetesOptions

# The runtime torch-distributed of Kubeflow Trainer 2.3.0
TORCH = """\
mlPolicy: {numNodes: 1, torch: {}}
template:
  spec:
    replicatedJobs:
    - name: node
      template:
        metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
        spec: {template: {spec: {containers: [{name: node, image: 'pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime'}]}}}
"""
# A runtime as a platform team writes it, with the API server's defaults
PLATFORM = """\
mlPolicy: {numNodes: 8, torch: {}}
podGroupPolicy: {volcano: {networkTopology: {mode: hard, highestTierAllowed: 1}}}
template:
  metadata: {labels: {team.example/owner: platform}, annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: rack}}
  spec:
    network: {publishNotReadyAddresses: false, subdomain: ring}
    replicatedJobs:
    - name: node
      groupName: default
      replicas: 1
      template:
        metadata: {labels: {team.example/cost: '7'}}
        spec:
          backoffLimit: 0
          template:
            metadata: {labels: {team.example/owner: platform, ddpctl.run: other}, annotations: {sidecar: 'false'}}
            spec:
              nodeSelector: {pool: h200}
              serviceAccountName: trainer
              schedulingGates: [{name: example.com/quota}]
              imagePullSecrets: [{name: registry}]
              priorityClassName: high
              restartPolicy: OnFailure
              tolerations:
              - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
              - {key: pool, value: h200, effect: NoExecute}
              initContainers: [{name: fetch, image: 'registry.example/fetch:1'}]
              containers:
              - name: node
                image: registry.example/torch:1
                command: [torchrun]
                args: [train.py]
                env: [{name: NCCL_SOCKET_IFNAME, value: eth1}, {name: HOME, value: /root}]
                envFrom: [{configMapRef: {name: site}}]
                ports: [{containerPort: 29500, protocol: TCP}]
                resources:
                  limits: {cpu: '96', memory: 1Ti, nvidia.com/gpu: 8, rdma/hca: 1}
                  requests: {cpu: '64'}
                volumeMounts: [{name: dshm, mountPath: /dev/shm}, {name: data, mountPath: /data, readOnly: true}]
              - {name: exporter, image: 'registry.example/dcgm:1'}
              volumes:
              - {name: dshm, emptyDir: {medium: Memory}}
              - {name: data, nfs: {server: nfs.example, path: /data}}
"""
NAME = "torch-distributed"


def objects_of(text: str, job: JobSpec = JOB, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The TrainingRuntime of a run that has this runtime as its base, and its pod."""
    chosen = KubernetesOptions(workload="trainjob", runtime=NAME, **options)
    draft = draft_of(job, chosen, runtime=yaml.safe_load(text))
    (runtime,) = WORKLOADS["trainjob"].before(draft)
    return runtime, target.bare_pod(draft, WORKLOADS["trainjob"])


@pytest.mark.parametrize("text", [TORCH, PLATFORM])
def test_a_run_on_a_runtime_of_the_cluster_is_valid_and_has_all_fields_of_ddpctl(text: str) -> None:
    base = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime", "metadata": {"name": NAME}}
    assert faults({**base, "spec": yaml.safe_load(text)}) == []
    runtime, pod = objects_of(text)
    assert faults(runtime) == []
    assert faults(pod, ("1.34",)) == []
    alone = draft_of(JOB, KubernetesOptions(workload="trainjob"))
    (plain,) = WORKLOADS["trainjob"].before(alone)
    assert runtime["metadata"] == plain["metadata"]
    assert runtime["spec"]["mlPolicy"] == plain["spec"]["mlPolicy"]
    (job,), (own,) = (each["spec"]["template"]["spec"]["replicatedJobs"] for each in (runtime, plain))
    assert job["template"]["spec"]["template"]["spec"] == pod["spec"]
    assert {**own["template"]["spec"], "template": 0}.items() <= {**job["template"]["spec"], "template": 0}.items()
    assert job["template"]["metadata"]["labels"].items() >= own["template"]["metadata"]["labels"].items()
    bare = target.bare_pod(alone, WORKLOADS["trainjob"])
    main, plain_main = (each["spec"]["containers"][0] for each in (pod, bare))
    for name in ("image", "command", "args", "workingDir", "securityContext"):
        assert main[name] == plain_main[name]
    assert all(entry in main["env"] for entry in plain_main["env"])
    assert all(entry in main["volumeMounts"] for entry in plain_main["volumeMounts"])
    assert all(volume in pod["spec"]["volumes"] for volume in bare["spec"]["volumes"])
    assert pod["metadata"]["labels"].items() >= bare["metadata"]["labels"].items()
    assert pod["spec"]["restartPolicy"] == "Never"


def test_a_run_keeps_the_fields_of_the_runtime() -> None:
    runtime, pod = objects_of(PLATFORM, labels={"team": "vision"})
    base = yaml.safe_load(PLATFORM)
    assert runtime["spec"]["podGroupPolicy"] == base["podGroupPolicy"]
    assert runtime["spec"]["template"]["metadata"] == base["template"]["metadata"]
    assert runtime["spec"]["template"]["spec"]["network"] == {"publishNotReadyAddresses": True}, (
        "names as Trainer expects"
    )
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"]["team.example/cost"] == "7"
    assert (pod["metadata"]["annotations"]["sidecar"], pod["metadata"]["labels"]["team"]) == ("false", "vision")
    theirs = base["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    for name in ("nodeSelector", "serviceAccountName", "schedulingGates", "imagePullSecrets", "priorityClassName"):
        assert pod["spec"][name] == theirs[name]
    assert pod["spec"]["initContainers"] == theirs["initContainers"]
    assert [container["name"] for container in pod["spec"]["containers"]] == ["node", "exporter"]
    keys = [item["key"] for item in pod["spec"]["tolerations"]]
    lost = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]
    assert keys == ["pool", "nvidia.com/gpu", *lost], "each once"
    main = pod["spec"]["containers"][0]
    assert {"name": "NCCL_SOCKET_IFNAME", "value": "eth1"} in main["env"]
    assert main["envFrom"] == theirs["containers"][0]["envFrom"]
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in main["volumeMounts"]
    assert theirs["volumes"][1] in pod["spec"]["volumes"]


@pytest.mark.parametrize(
    ("job", "cpu", "memory"),
    [
        (JobSpec(name="digits", nodes="2", gpus=2), ("64", "96"), (None, "1Ti")),
        (JobSpec(name="digits", nodes="2", gpus=2, cpus=4, memory="16Gi"), ("4", "4"), ("16Gi", "16Gi")),
    ],
)
def test_the_jobs_own_size_precedes_that_of_the_runtime(job: JobSpec, cpu: Any, memory: Any) -> None:
    _, pod = objects_of(PLATFORM, job)
    resources = pod["spec"]["containers"][0]["resources"]
    for name, expected in (("cpu", cpu), ("memory", memory)):
        assert tuple(resources[part].get(name) for part in ("requests", "limits")) == expected
    assert (resources["limits"]["nvidia.com/gpu"], resources["limits"]["rdma/hca"]) == ("2", 1)
    amd = PLATFORM.replace("nvidia.com/gpu: 8", "amd.com/gpu: 8")
    with refused(ConfigError, "amd.com/gpu"):  # which no rank would use
        objects_of(amd, replace(job, device="cpu"), gpu_resource="amd.com/gpu")


def test_the_numbers_of_nodes_and_ranks_of_the_runtime_are_replaced() -> None:
    runtime, _ = objects_of(TORCH.replace("torch: {}", "torch: {numProcPerNode: 8}"))  # of Trainer 2.0 and 2.1
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}


def test_the_users_patch_comes_after_the_runtime() -> None:
    patch = {"spec": {"nodeSelector": {"pool": "a100"}, "containers": [{"name": "exporter", "$patch": "delete"}]}}
    runtime, pod = objects_of(PLATFORM, pod=patch)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    for spec in (pod["spec"], job["template"]["spec"]["template"]["spec"]):
        assert spec["nodeSelector"] == {"pool": "a100"}
        assert [container["name"] for container in spec["containers"]] == ["node"]


CPU = JobSpec(name="digits", nodes="2", gpus=2, device="cpu")


@pytest.mark.parametrize(
    ("change", "job", "names"),
    [
        (("mlPolicy: {numNodes: 1, torch: {}}", "mlPolicy: {mpi: {}}"), JOB, ["mlPolicy.mpi"]),
        (("- name: node", "- {name: dataset-initializer}\n    - name: node"), JOB, ["dataset-initializer"]),
        (("replicatedJobs:", "failurePolicy: {maxRestarts: 3}\n    replicatedJobs:"), JOB, ["failurePolicy"]),
        (("name: node, image", "volumeMounts: [{name: a, mountPath: /runs}], name: node, image"), JOB, ["/runs"]),
        (("name: node, image", "resources: {limits: {nvidia.com/gpu: 8}}, name: node, image"), CPU, ["nvidia.com/gpu"]),
    ],
)
def test_a_runtime_that_contradicts_a_run_is_refused_by_its_field(
    change: tuple[str, str], job: JobSpec, names: list[str]
) -> None:
    assert change[0] in TORCH
    with pytest.raises(DdpctlError) as error:
        submit({NAME: answer_of(TORCH.replace(*change))}, job)
    assert error.value.code == 78
    assert_names(error.value, "runtime", *names)


def answer_of(text: str, kind: str = "ClusterTrainingRuntime") -> Output:
    return Output(returncode=0, stdout=json.dumps({"kind": kind, "spec": yaml.safe_load(text)}))


def submit(
    answers: Mapping[str, Output], job: JobSpec = JOB, name: str = NAME, commands: list[Command] | None = None
) -> list[Command]:
    options = KubernetesOptions(workload="trainjob", runtime=name)
    given = {**answers, "config view": VIEW, "jsonpath={.metadata.uid}": Output(returncode=0, stdout="af8e18f3")}
    return perform(target.KubernetesTarget(options, {}).submit(plan_of(job), attached=True), given, commands)[0]


@pytest.mark.parametrize("kind", ["ClusterTrainingRuntime", "TrainingRuntime"])
def test_a_launch_reads_the_runtime_even_in_a_dry_run_and_sends_its_fields(kind: str) -> None:
    name = NAME if kind.startswith("C") else f"{kind}/{NAME}"
    commands = submit({NAME: answer_of(PLATFORM, kind)}, name=name)
    (read,) = matching(commands, NAME)
    resource = f"{kind.lower()}s.trainer.kubeflow.org"
    assert lines([read]) == [f"{KUBECTL} get {resource} {NAME} --ignore-not-found -o json"]
    assert read.probe
    things = [yaml.safe_load(command.stdin or "") for command in matching(commands, "create --validate")]
    (runtime,) = [thing for thing in things if thing["kind"] == "TrainingRuntime"]
    assert runtime["spec"]["podGroupPolicy"] == yaml.safe_load(PLATFORM)["podGroupPolicy"]
    assert runtime["metadata"]["name"] == "digits-otter"
    job = yaml.safe_load(only(commands, "jsonpath={.metadata.uid}").stdin or "")
    assert job["spec"]["runtimeRef"]["name"] == "digits-otter"


def test_a_runtime_that_does_not_exist_is_named_with_those_that_exist() -> None:
    known = Output(returncode=0, stdout="jax-distributed torch-distributed")
    commands: list[Command] = []
    with pytest.raises(DdpctlError) as error:
        submit({"jsonpath={.items[*]": known}, name="torch-distibuted", commands=commands)
    assert (error.value.code, any(command.starts for command in commands)) == (78, False)
    assert_names(error.value, "ClusterTrainingRuntime", "torch-distibuted", "jax-distributed", NAME)


def test_a_rendered_spec_has_no_runtime_of_the_cluster() -> None:
    options = KubernetesOptions(workload="trainjob", runtime=NAME)
    with pytest.raises(ConfigError) as error:
        target.KubernetesTarget(options, {}).render(plan_of(JOB))
    assert_names(error.value, "runtime", "--dry-run")
