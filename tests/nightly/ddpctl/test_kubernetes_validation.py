"""A patch in the file has the types of JSON."""

from pathlib import Path

import pytest
from tests.unit.ddpctl import test_kubernetes_validation
from tests.unit.ddpctl.test_kubernetes_validation import GOOD, KUBECTL, load


def test_a_patch_in_the_file_has_the_types_of_json(tmp_path: Path) -> None:
    spec = "{hostNetwork: true, priority: 5, a: 0.5, b: '5', c: null, d: yes, e: 010, f: [1, {g: ~}], h: 2026-11-27}"
    pod = load(tmp_path, GOOD.replace("kubernetes}", f"kubernetes, pod: {{spec: {spec}}}}}")).options.pod
    assert pod == {
        "spec": {
            "hostNetwork": True,
            "priority": 5,
            "a": 0.5,
            "b": "5",
            "c": None,
            "d": "yes",
            "e": "010",
            "f": [1, {"g": None}],
            "h": "2026-11-27",
        }
    }


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl, for kubectl patch --local")
@pytest.mark.parametrize(
    "patch",
    [
        "metadata: {annotations: {b: two}}",
        "spec: {runtimeClassName: nvidia, serviceAccountName: trainer, hostNetwork: true}",
        "spec: {tolerations: [{key: spot, operator: Exists}]}",
        "spec: {imagePullSecrets: [{name: other}]}",
        "spec: {topologySpreadConstraints: [{topologyKey: host, whenUnsatisfiable: DoNotSchedule}]}",
        "spec: {affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
        "[{matchExpressions: [{key: a, operator: In, values: [b]}]}]}}}}",
        "spec: {hostAliases: [{ip: 10.0.0.1, hostnames: [a]}]}",
        "spec: {initContainers: [{name: fetch, image: f, command: [sh]}]}",
        "spec: {initContainers: [{name: side, image: s, restartPolicy: Always}]}",
        "spec: {containers: [{name: side, image: s}]}",
        "spec: {containers: [{name: side, image: s}, {name: main, tty: true}, {name: other, image: o}]}",
        "spec: {containers: [{name: main, args: [c]}]}",
        "spec: {containers: [{name: main, env: [{name: B, value: new}]}]}",
        "spec: {containers: [{name: main, env: [{name: D, value: four}, {name: A, value: new}]}]}",
        "spec: {containers: [{name: main, env: [{$patch: replace}, {name: D, value: four}]}]}",
        "spec: {containers: [{name: main, env: [{name: D, valueFrom: {secretKeyRef: {name: s, key: k}}}]}]}",
        "spec: {containers: [{name: main, ports: [{containerPort: 8080, name: http}, "
        "{containerPort: 9500, name: m}]}]}",
        "spec: {containers: [{name: main, volumeMounts: [{name: data, mountPath: /data}, "
        "{name: data, mountPath: /tmp}]}], volumes: [{name: data, nfs: {server: s, path: /p}}]}",
        "spec: {volumes: [{name: tmp, emptyDir: null, hostPath: {path: /scratch}}]}",
        "spec: {volumes: [{name: data, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce], "
        "resources: {requests: {storage: 1Gi}}}}}}, {name: c, csi: {driver: d.example}}]}",
        "spec: {volumes: [{name: shm, emptyDir: {$patch: replace, sizeLimit: 2Gi}}]}",
        "spec: {terminationGracePeriodSeconds: 90, schedulerName: volcano, priority: 5}",
        "metadata: {annotations: null, labels: {team: audio}}",
        "spec: {topologySpreadConstraints: null}",
        "spec: {containers: [{name: main, args: null}]}",
        "spec: {containers: [{name: main, env: [{name: B, $patch: delete}]}]}",
    ],
)
def test_a_patch_gives_what_kubectl_gives(patch, tmp_path):
    test_kubernetes_validation.test_a_patch_gives_what_kubectl_gives(patch, tmp_path)


@pytest.mark.parametrize(
    ("patch", "names"),
    [
        ("spec: {containers: [{name: main, command: [python]}]}", ["command"]),
        ("spec: {containers: [{name: main, image: other}]}", ["image"]),
        ("spec: {containers: [{name: main, env: [{name: DDP_RUN_ID, $patch: delete}]}]}", ["DDP_RUN_ID"]),
        ("spec: {containers: [{name: main, ports: [{containerPort: 23456, name: x}]}]}", ["pytorchjob-port"]),
        ("spec: {containers: [{name: main, resources: {limits: {nvidia.com/gpu: 1}}}]}", ["nvidia.com/gpu"]),
        ("spec: {hostname: a}", ["hostname"]),
        ("spec: {terminationGracePeriodSeconds: 1}", ["terminationGracePeriodSeconds"]),
        ("spec: {containers: [{image: a}]}", ["containers", "name"]),
        ("spec: {containers: [a]}", ["containers", "name"]),
        ("spec: 5", ["spec"]),
        ("spec: {containers: main}", ["containers"]),
        ("spec: {containers: {name: main}}", ["containers"]),
        ("spec: {securityContext: root}", ["securityContext"]),
        ("spec: {containers: [{name: main, volumeMounts: [{name: a, mountPath: /runs}]}]}", ["/runs"]),
        ("spec: {$retainKeys: [a]}", ["retainKeys"]),
        ("spec: {nodeSelector: {$patch: drop}}", ["drop", "replace"]),
        ("metadata: [a]", ["metadata"]),
    ],
)
def test_a_patch_that_contradicts_the_contract_is_refused(patch, names):
    test_kubernetes_validation.test_a_patch_that_contradicts_the_contract_is_refused(patch, names)


@pytest.mark.parametrize(
    ("word", "patches", "names"),
    [
        ("pytorchjob", "PyTorchJob: {spec: {runPolicy: {backoffLimit: 1}}}", ["PyTorchJob"]),
        ("pytorchjob", "PyTorchJob: {spec: {runPolicy: null}}", ["PyTorchJob"]),
        ("pytorchjob", "PyTorchJob: {spec: {$patch: replace}}", ["PyTorchJob"]),
        ("pytorchjob", "PyTorchJob: {metadata: {name: other}}", ["PyTorchJob"]),
        ("trainjob", "TrainingRuntime: {spec: {template: {spec: {replicatedJobs: []}}}}", ["TrainingRuntime"]),
        ("pytorchjob", "PyTorchJob: {spec: null}", ["PyTorchJob"]),
        ("job", "Job: {spec: 5}", ["spec"]),
    ],
)
def test_a_patch_of_a_manifest_may_only_add(word, patches, names):
    test_kubernetes_validation.test_a_patch_of_a_manifest_may_only_add(word, patches, names)
