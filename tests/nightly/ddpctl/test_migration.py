"""More files, commands and options of other launchers."""

from pathlib import Path

import pytest
from tests.unit.ddpctl import test_migration
from tests.unit.ddpctl.test_migration import migrated, statuses

from ddpctl.migration.shell import Variables, statements

PYTORCHJOB = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: net, namespace: ml, labels: {team: a, kueue.x-k8s.io/queue-name: q}}
spec:
  runPolicy: {ttlSecondsAfterFinished: 600, backoffLimit: 3}
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      restartPolicy: OnFailure
      template:
        metadata: {annotations: {a: b}}
        spec:
          nodeSelector: {gpu: a100}
          volumes: [{name: data, persistentVolumeClaim: {claimName: data}}, {name: shm, emptyDir: {medium: Memory}}]
          containers:
            - name: pytorch
              image: ghcr.io/net:1
              command: [torchrun, --nproc_per_node, "2", train.py]
              args: [--data, /data, $(DATA)]
              env:
                - {name: NCCL_DEBUG, value: INFO}
                - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}
              resources: {limits: {nvidia.com/gpu: 2, cpu: 8, memory: 32Gi, x.com/efa: 1}, requests: {cpu: 8}}
              volumeMounts: [{name: data, mountPath: /data}, {name: shm, mountPath: /dev/shm}]
    Worker:
      replicas: 3
      restartPolicy: OnFailure
      template: {spec: {containers: [{name: pytorch, image: other}]}}
"""


def test_a_trainjob_becomes_a_job_on_kubernetes(tmp_path: Path) -> None:
    text = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: net}
spec:
  runtimeRef: {name: torch-distributed}
  trainer:
    numNodes: 2
    numProcPerNode: 4
    image: ghcr.io/net:1
    command: [bash, -c, "python prepare.py && torchrun train.py --lr 1"]
    resourcesPerNode: {limits: {nvidia.com/gpu: 4}}
"""
    migration = migrated(tmp_path, text)
    assert migration.values == {
        "target.workload": "trainjob", "job.name": "net", "job.nodes": "2", "job.gpus": "4",
        "job.image": "ghcr.io/net:1", "job.command": ("train.py", "--lr", "1"),
    }  # fmt: skip
    assert statuses(migration)["spec.runtimeRef.name=torch-distributed"] == "unknown"
    assert statuses(migration)["python prepare.py"] == "not translated"


def test_a_configuration_of_accelerate_is_no_launch(tmp_path: Path) -> None:
    text = "distributed_type: FSDP\nnum_machines: 2\nnum_processes: 8\nmain_process_port: 29501\nmachine_rank: 0\n"
    migration = migrated(tmp_path, text + "fsdp_config: {fsdp_offload_params: false}\n")
    assert migration.values == {"job.nodes": "2", "job.port": "29501"}
    of = statuses(migration)
    assert (of["machine_rank=0"], of["distributed_type=FSDP"]) == ("ddpctl does it", "no counterpart")
    assert (of["num_processes=8"], of["fsdp_config.fsdp_offload_params=false"]) == ("not translated", "no counterpart")


def test_a_docker_compose_file_is_no_launch(tmp_path: Path) -> None:
    text = (
        "services:\n  net:\n    image: ghcr.io/net:1\n    ports: ['6006:6006']\n    environment: [API_KEY=abcdef123]\n"
    )
    migration = migrated(tmp_path, text + "    ipc: host\n")
    assert migration.values == {}
    assert statuses(migration) == {
        "services.net.image": "not translated", "services.net.ports.0": "no counterpart",
        "services.net.environment.0": "not translated", "services.net.ipc": "ddpctl does it",
    }  # fmt: skip
    assert "abcdef123" not in migration.text("file")


def test_options_of_apptainer_without_a_key_are_named(tmp_path: Path) -> None:
    options = "--nv --bind ~/a:/a --pwd . -c $MORE library://a/b"
    of = statuses(migrated(tmp_path, f"#!/bin/bash\napptainer exec {options} python t.py\n"))
    assert (of["--nv"], of["--pwd=."], of["--contain"]) == ("ddpctl does it", "ddpctl does it", "target.runtime_args")
    assert (of["--bind=~/a:/a"], of["$MORE"], of["library://a/b"]) == ("unknown", "unknown", "no counterpart")


@pytest.mark.parametrize(
    ("script", "values"),
    [
        (
            "srun apptainer exec --nv -B /data /images/net.sif python t.py",
            {
                "target.runtime": "apptainer",
                "target.sif": "/images/net.sif",
                "job.mounts": ("/data:/data",),
                "job.gpus": "1",
                "job.command": ("t.py",),
            },
        ),
        (
            "apptainer -q exec --nv --bind /lus/net:/net,~/a:/a,$PWD:/p --env A=1,B=2 -C --pwd /net docker://a/net:1 "
            "python t.py",
            {
                "target.runtime": "apptainer",
                "job.mounts": ("/lus/net:/net",),
                "job.env": {"A": "1", "B": "2"},
                "target.runtime_args": ("--containall",),
                "job.image": "a/net:1",
                "target.workdir": "/lus/net",
                "job.gpus": "1",
                "job.command": ("t.py",),
            },
        ),
        (
            "apptainer exec --pwd /p -B $PWD:/p $SIF /opt/bin/python t.py",
            {"target.runtime": "apptainer", "job.gpus": "1", "job.command": ("t.py",)},
        ),
        (
            "srun singularity exec $OPTIONS --pwd /net /a.sif bash -c 'torchrun --nproc_per_node 2 t.py'",
            {
                "target.runtime": "apptainer",
                "target.workdir": "/net",
                "target.sif": "/a.sif",
                "job.gpus": "2",
                "job.command": ("t.py",),
            },
        ),
        ("apptainer python t.py", {"target.runtime": "apptainer", "job.gpus": "1", "job.command": ("t.py",)}),
        (
            "D=/data\nmkdir -p $D/a\ncp *.tar /tmp\ncp $X /tmp\n[ -d b ] || mkdir b\ncp $D/*.gz /tmp\npython t.py\n"
            "mkdir c",
            {"job.node_setup": ("mkdir -p /data/a", "cp *.tar /tmp"), "job.gpus": "1", "job.command": ("t.py",)},
        ),
        (
            'ARGS=(--a 1)\nARGS+=(--b "x y")\nsrun python t.py "${ARGS[@]}" ${LR:-0.1}',
            {"job.gpus": "1", "job.command": ("t.py", "--a", "1", "--b", "x y", "0.1")},
        ),
        ("if true; then N=2; fi\ntorchrun --nproc-per-node $N t.py", {"job.command": ("t.py",)}),
        (
            'cat <<EOF >ds.json\nsrun python no.py\nEOF\nsrun python t.py "$@" $1',
            {"job.gpus": "1", "job.command": ("t.py", "$1")},
        ),
        (
            'export CMD="torchrun --nproc-per-node 2 t.py"\nsrun bash -c "$CMD"',
            {"job.env": {"CMD": "torchrun --nproc-per-node 2 t.py"}, "job.gpus": "2", "job.command": ("t.py",)},
        ),
        (
            "singularity run a.sif torchrun --nproc-per-node 2 t.py",
            {"target.runtime": "apptainer", "job.gpus": "2", "job.command": ("t.py",)},
        ),
        ("python -c 'import torch'", {}),
        ("LR=1 python -m net.train", {"job.gpus": "1", "job.env": {"LR": "1"}, "job.command": ("-m", "net.train")}),
        (
            "deepspeed --num_gpus=2 t.py --deepspeed ds.json",
            {"job.gpus": "2", "job.command": ("t.py", "--deepspeed", "ds.json")},
        ),
        (
            "srun --container-image=nvcr.io#nvidia/pytorch:24.01 --container-mounts=/data:/data:ro,$PWD:/x "
            "--container-name=a --export=ALL,A=1 python t.py",
            {
                "job.image": "nvcr.io/nvidia/pytorch:24.01",
                "target.runtime": "pyxis",
                "job.mounts": ("/data:/data:ro",),
                "target.runtime_args": ("--container-name=a",),
                "job.env": {"A": "1"},
                "job.gpus": "1",
                "job.command": ("t.py",),
            },
        ),
    ],
)
def test_a_command_becomes_keys(script, values, tmp_path):
    test_migration.test_a_command_becomes_keys(script, values, tmp_path)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (
            "--nodes=2 --ntasks=8 --gpus-per-task=1 --cpus-per-task=4 --mem-per-cpu=2000",
            {"job.nodes": "2", "job.gpus": "4", "job.cpus": "16"},
        ),
        (
            "--time=1:30 --chdir=. --comment=x",
            {"target.extra": ("--comment=x",)},
        ),  # a limit that is too short for ddpctl
        (
            "--time=2-0 --gpus-per-node=a100:2 --gres=lustre:1",
            {"job.time_limit": "2-0", "job.gpus": "2", "target.gpu_type": "a100", "target.extra": ("--gres=lustre:1",)},
        ),
        ("--signal=HUP", {}),
        ("--time=$LIMIT --time=0 --partition='a b' --dependency=afterok:7 --exclusive=user", {}),
    ],
)
def test_options_of_sbatch_become_keys(options, values, tmp_path):
    test_migration.test_options_of_sbatch_become_keys(options, values, tmp_path)


MORE_BAD = [
    ("another kind", b"kind: Pod\n"),
    ("a list", b"[1, 2]"),
    ("huge", b"#SBATCH -N 2\n" * 20_000),
    ("a tag", b"kind: !!python/object PyTorchJob\n"),
    ("half", b"kind: PyTorchJob\nspec: {a: [b"),
    ("another form", b"kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Worker: {template: 7}}}\n"),
    ("services", b"services: 7\n"),
    ("no container", b"kind: PyTorchJob\nspec: {pytorchReplicaSpecs: {Master: {template: {spec: {containers: []}}}}}"),
]


@pytest.mark.parametrize(
    "data",
    [data for _, data in MORE_BAD],
)
def test_bad_input_is_one_line_and_writes_nothing(data, tmp_path):
    test_migration.test_bad_input_is_one_line_and_writes_nothing(data, tmp_path)


@pytest.mark.parametrize(
    ("command", "flags", "env", "program"),
    [
        ("torchrun --nnodes 1:4 --nproc 8 -m pkg.train", {"--nodes": "1:4", "--gpus": "8"}, {}, "-m pkg.train"),
        ("torchrun train.py --nproc-per-node 2", {}, {}, "train.py --nproc-per-node 2"),
        ("torchrun --standalone --rdzv-id 7 --max-restarts 3 train.py", {"--max-restarts": "3"}, {}, "train.py"),
        ("python3 -m torch.distributed.launch --use_env train.py", {}, {}, "train.py"),
        ("--nproc-per-node 2 train.py", {"--gpus": "2"}, {}, "train.py"),
        ("accelerate launch --cpu --multi_gpu t.py", {"--device": "cpu"}, {}, "t.py"),
        ("python -m deepspeed.launcher.runner --num_gpus 2 t.py", {"--gpus": "2"}, {}, "t.py"),
    ],
)
def test_options_become_flags(command, flags, env, program):
    test_migration.test_options_become_flags(command, flags, env, program)


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("torchrun --rdzv train.py", "train.py"),  # it means the value of an ambiguous option that ddpctl leaves out
        ("torchrun --n 2 train.py", "--n"),
        ("torchrun --nproc-per-node gpu train.py", "--gpus"),
        ("torchrun --nproc-per-node 2", "torchrun"),
        ("torchrun --nproc-per-node", "--nproc-per-node"),
        ("accelerate launch --config_file c.yaml t.py", "--config_file"),
        ("accelerate launch --num_machines 2 --num_processes 3 t.py", "--num_machines"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_by_name(command, fact):
    test_migration.test_an_option_without_a_counterpart_is_refused_by_name(command, fact)


def test_a_shell_script_is_split_into_its_commands() -> None:
    script = "a 'b c' && d | e # f\nfor x in 1 2; do\n  g $x >out\ndone\nh() { i; }\nj=(1 2)\nk \\\n  l"
    assert [
        (statement.line, statement.arguments, statement.after, statement.redirects, statement.inside)
        for statement in statements(script)
        if statement.arguments
    ] == [
        (1, ("a", "'b c'"), "", False, False),
        (1, ("d",), "&&", False, False),
        (1, ("e",), "|", False, False),
        (2, ("for", "x", "in", "1", "2"), "", False, True),
        (3, ("g", "$x"), "", True, True),
        (5, ("h",), "", False, False),
        (5, ("i",), "", False, True),
        (6, ("j=(1 2)",), "", False, False),
        (7, ("k", "l"), "", False, False),
    ]


@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("$A", ["1", "2"]), ('"$A"', ["1 2"]), ("'$A'", ["$A"]), ("x${B}y", ["x3y"]), ("$C", ["$C"]),
        ("$(pwd)", ["$(pwd)"]),
        ("${C:-4}", ["4"]),
        ("${D:-4}", ["${D:-4}"]), ("$((B * 2))", ["6"]), ("$((B % 2))", ["$((B % 2))"]), ('""', [""]),
        ("$E", []), ('"${L[@]}"', ["p q", "r"]), (r"\$B", ["$B"]), ('"$(f "$B")"', ['$(f "$B")']),
    ],
)  # fmt: skip
def test_a_word_is_expanded_as_far_as_it_is_known(word: str, fields: list[str]) -> None:
    variables = Variables({"A": "1 2", "B": "3", "E": "", "L": ["p q", "r"]}, {"D"})
    assert variables.expand(word) == fields


def test_a_pytorchjob_becomes_a_job_on_kubernetes(tmp_path: Path) -> None:
    migration = migrated(tmp_path, PYTORCHJOB + "---\nkind: Service\n")
    assert migration.values == {
        "target.workload": "pytorchjob", "job.name": "net", "target.namespace": "ml", "target.labels": {"team": "a"},
        "target.queue": "q", "target.keep": "600s", "job.nodes": "4", "target.master": True,
        "target.restart": "OnFailure", "job.gpus": "2", "job.cpus": "8", "job.memory": "32Gi",
        "job.image": "ghcr.io/net:1", "job.command": ("train.py", "--data", "/data", "$(DATA)"),
        "job.env": {"NCCL_DEBUG": "INFO"},
        "target.pod": {
            "metadata": {"annotations": {"a": "b"}},
            "spec": {
                "nodeSelector": {"gpu": "a100"},
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                "containers": [{
                    "name": "main",
                    "resources": {"limits": {"x.com/efa": 1}},
                    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }],
            },
        },
    }  # fmt: skip
    of = statuses(migration)
    assert of["spec.pytorchReplicaSpecs.Worker.template"] == "no counterpart"
    assert of["spec.runPolicy.backoffLimit=3"] == "no counterpart"
    assert of["kind=Service"] == "no counterpart"
    assert of["$(DATA)"] == "unknown"
