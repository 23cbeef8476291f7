"""What the files and the command lines of other launchers become: each setting, the keys and their values."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.in_process import ddpctl as in_process
from tests.messages import assert_names, refused

from ddpctl import targets
from ddpctl.errors import UsageError
from ddpctl.job.other_launchers import translate
from ddpctl.migration.formats import migrate
from ddpctl.migration.settings import Migration
from ddpwire.exits import Exit

SBATCH = """\
#!/bin/bash
#SBATCH --job-name=My_Net      # a comment
#SBATCH -N 2 --ntasks-per-node=1
#SBATCH --gres=gpu:a100:4,nvme:1
#SBATCH --cpus-per-task=32 --mem=372G
#SBATCH -t 1-12:00:00
#SBATCH -p gpu -A lab
#SBATCH --mail-type=END
#SBATCH --hint=nomultithread
#SBATCH --array=0-3%2
#SBATCH -o logs/%x.out

module purge
module load cuda/12.4 nccl
source /envs/net/bin/activate
export MASTER_ADDR=$(scontrol show hostnames | head -n 1)
export NCCL_DEBUG=INFO WANDB_API_KEY=abcdef123456
export CACHE=$SCRATCH/cache
GPUS=4
OPTIONS="--lr 0.1 --epochs 3"
mkdir -p results
if [ -f more.sh ]; then
  source more.sh
fi
srun --kill-on-bad-exit=1 torchrun --nnodes $SLURM_NNODES --nproc_per_node=$GPUS \\
  --rdzv_endpoint $MASTER_ADDR:29500 --tee 3 train.py $OPTIONS --out "$SCRATCH/out" | tee log.txt
#SBATCH --qos=late
echo done
"""


def migrated(folder: Path, text: str, name: str = "file") -> Migration:
    (folder / name).write_text(text)
    return migrate(folder / name, targets.kinds())


def statuses(migration: Migration) -> dict[str, str]:
    """The key that each setting has become, or its status."""
    settings = sorted(dict.fromkeys(migration.settings), key=lambda setting: setting[0])
    return {
        text: meaning.text if meaning.status == "became" else meaning.status
        for (_, _, meaning), (_, text, _) in zip(settings, migration.rows(), strict=True)
    }


def test_an_sbatch_script_becomes_a_job_on_slurm(tmp_path: Path) -> None:
    assert migrated(tmp_path, SBATCH).values == {
        "job.name": "my-net", "job.nodes": "2", "job.gpus": "4", "job.cpus": "32", "job.memory": "372G",
        "job.time_limit": "1-12:00:00", "job.env": {"NCCL_DEBUG": "INFO"}, "job.secrets": ("WANDB_API_KEY",),
        "job.command": ("train.py", "--lr", "0.1", "--epochs", "3", "--out", "$SCRATCH/out"),
        "target.gpu_type": "a100", "target.gpu_request": "gres", "target.partition": "gpu", "target.account": "lab",
        "target.extra": ("--gres=nvme:1", "--hint=nomultithread"), "target.array": "0-3%2",
        "job.node_setup": ("mkdir -p results",),
        "target.modules": ("cuda/12.4", "nccl"), "target.python": "/envs/net/bin/python",
    }  # fmt: skip


def test_each_line_of_an_sbatch_script_is_accounted_for(tmp_path: Path) -> None:
    migration = migrated(tmp_path, SBATCH)
    assert {line for line, _, _ in migration.settings} == {*range(2, 12), *range(13, 24), *range(25, 29)}
    of = statuses(migration)
    assert of["--mail-type=END"] == "no counterpart"
    assert of["--output=logs/%x.out"] == "ddpctl does it"
    assert of["MASTER_ADDR=$(scontrol show hostnames | head -n 1)"] == "ddpctl does it"
    assert of["CACHE=$SCRATCH/cache"] == "unknown"
    assert of["mkdir -p results"] == "job.node_setup"
    assert of["source more.sh"] == "not translated"
    assert of["--tee 3"] == "no counterpart"
    assert of["$SCRATCH/out"] == "unknown"
    assert of["#SBATCH --qos=late"] == "not translated"
    assert of["--kill-on-bad-exit=1"] == "ddpctl does it"


def test_no_output_contains_a_secret(tmp_path: Path) -> None:
    script = "#!/bin/sh\nexport HF_TOKEN=hf_abcdef\nTOKEN=secret99\nhuggingface-cli login hf_abcdef\n"
    script += "export DB_URL=postgres://u:secret99@h/db\ncurl -H 'Authorization: Bearer bearer77' https://h\n"
    script += "srun python train.py --token=secret99 --api-key key12345\n"
    migration = migrated(tmp_path, script)
    assert "bearer77" not in migration.text("file")
    texts = migration.text("file") + str(migration.rows())
    assert not [secret for secret in ("hf_abcdef", "secret99", "key12345") if secret in texts]
    assert migration.values["job.secrets"] == ("HF_TOKEN", "DB_URL")
    assert migration.values["job.command"] == ("train.py", "--token=[REDACTED]", "--api-key", "[REDACTED]")


def test_a_pytorchjob_becomes_a_job_on_kubernetes(tmp_path: Path) -> None:
    container = {"image": "net:1", "command": ["torchrun", "--nproc_per_node", "2", "train.py"], "args": ["--lr", "1"]}
    container["resources"] = {"limits": {"nvidia.com/gpu": 2, "cpu": 8}}
    replica = {"replicas": 1, "template": {"spec": {"nodeSelector": {"gpu": "a100"}, "containers": [container]}}}
    spec = {"runPolicy": {"backoffLimit": 3}, "pytorchReplicaSpecs": {"Master": replica, "Worker": {"replicas": 3}}}
    migration = migrated(tmp_path, yaml.safe_dump({"kind": "PyTorchJob", "metadata": {"name": "net"}, "spec": spec}))
    assert migration.values == {
        "target.workload": "pytorchjob", "job.name": "net", "job.nodes": "4", "target.master": True, "job.gpus": "2",
        "job.cpus": "8", "job.image": "net:1", "job.command": ("train.py", "--lr", "1"),
        "target.pod": {"spec": {"nodeSelector": {"gpu": "a100"}}},
    }  # fmt: skip
    assert statuses(migration)["spec.runPolicy.backoffLimit=3"] == "no counterpart"


def test_a_hostfile_becomes_hosts(tmp_path: Path) -> None:
    migration = migrated(tmp_path, "# hosts\nalpha slots=4\nbeta slots=2\n")
    assert migration.values == {
        "target.hosts": [{"address": "alpha", "gpus": 4}, {"address": "beta", "gpus": 2}],
        "job.gpus": [4, 2], "job.nodes": "2", "target.runtime": "none",
    }  # fmt: skip
    assert migrated(tmp_path, "alpha slots=4\nbeta slots=4\n").values["job.gpus"] == "4"


COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("srun python -u train.py", {"job.gpus": "1", "job.command": ("train.py",)}),
    ("/envs/a/bin/torchrun --nproc-per-node 2 t.py",
     {"target.python": "/envs/a/bin/python", "job.gpus": "2", "job.command": ("t.py",)}),
    ("srun bash -c 'accelerate launch --num_machines 2 --num_processes 8 t.py'",
     {"job.nodes": "2", "job.gpus": "4", "job.command": ("t.py",)}),
    ("python prepare.py\nsrun torchrun --nproc-per-node 2 t.py", {"job.gpus": "2", "job.command": ("t.py",)}),
]  # fmt: skip


@pytest.mark.parametrize(("script", "values"), COMMANDS, ids=[script for script, _ in COMMANDS])
def test_a_command_becomes_keys(script: str, values: dict[str, Any], tmp_path: Path) -> None:
    assert migrated(tmp_path, f"#!/bin/bash\n{script}\n").values == values


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("--gpus=8 -N2 --mem-per-gpu=10G --cpus-per-gpu=6",
     {"job.nodes": "2", "job.gpus": "4", "job.cpus": "24"}),
    ("--nodes=2-4 --time=90 --no-requeue --exclusive --mem=0",
     {"job.nodes": "2:4", "job.time_limit": "90m", "target.requeues": "0", "target.exclusive": True,
      "target.extra": ("--mem=0",)}),
    ("--signal=B:SIGUSR1@120", {"job.stop_signal": "USR1", "job.grace": "120"}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "values"), OPTIONS, ids=[options for options, _ in OPTIONS])
def test_options_of_sbatch_become_keys(options: str, values: dict[str, Any], tmp_path: Path) -> None:
    migration = migrated(tmp_path, f"#!/bin/bash\n#SBATCH {options}\n")
    assert migration.values == values
    assert all(meaning.text for _, _, meaning in migration.settings)


def test_ranks_share_the_gpus_of_a_node_as_under_torchrun(tmp_path: Path) -> None:
    script = "#!/bin/sh\n#SBATCH --gpus-per-node=4\ntorchrun --nproc-per-node 2 t.py\n"
    assert migrated(tmp_path, script).values == {"job.gpus": "4", "job.ranks": "2", "job.command": ("t.py",)}


BAD: list[tuple[str, bytes]] = [
    ("binary", b"\x7fELF\x00\x01"), ("not UTF-8", b"#SBATCH \xff"), ("empty", b""), ("prose", b"A letter: to you: ok"),
        ]  # fmt: skip


@pytest.mark.parametrize("data", [data for _, data in BAD], ids=[name for name, _ in BAD])
def test_bad_input_is_one_line_and_writes_nothing(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data)
    done = in_process("init", "--from", "file", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (Exit.USAGE, "", 1)
    assert_names(done.stderr, "file")
    assert not (tmp_path / "ddpctl.yaml").exists()


def test_a_missing_file_is_missing_input(tmp_path: Path) -> None:
    assert in_process("init", "--from", "none", cwd=tmp_path).returncode == Exit.NO_INPUT


def test_init_writes_a_file_that_renders_and_never_overwrites_it(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(SBATCH)
    done = in_process("init", "--from", "job.sbatch", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[:2]] == [
        ["LINE", "SETTING"],
        ["2", "--job-name=My_Net"],
    ]
    text = (tmp_path / "ddpctl.yaml").read_text()
    assert "abcdef123456" not in done.stdout + done.stderr + text
    written = yaml.safe_load(text)
    assert written["job"]["nodes"] == 2
    assert written["targets"]["slurm"]["modules"] == ["cuda/12.4", "nccl"]
    (tmp_path / "train.py").touch()
    rendered = in_process("render", cwd=tmp_path)
    assert rendered.returncode == 0, rendered.stderr
    assert {"#SBATCH --nodes=2", "#SBATCH --time=1-12:00:00", "#SBATCH --mem=380928M"} <= set(
        rendered.stdout.splitlines()
    )
    assert ("$SCRATCH" in rendered.stderr, rendered.stderr.count("\n")) == (True, 1)
    again = in_process("init", "--from", "job.sbatch", cwd=tmp_path)
    assert (again.returncode, (tmp_path / "ddpctl.yaml").read_text()) == (Exit.USAGE, text)


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("train.py --lr $LR --out=$OUT", "first write its 2 unknown values"),
        ("train.py --lr $LR", "first write its 1 unknown value,"),
        ("train.py --lr 0.1 --out ${OUT:-here}", "to run the job in it"),
    ],
)
def test_the_last_line_of_init_counts_the_values_to_write_before_a_launch(
    command: str, fact: str, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\nsrun python {command}\n")
    done = in_process("init", "--from", "job.sh", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert_names(done.stderr, fact, "ddpctl launch")
    assert ("unknown" in done.stderr) == ("unknown" in fact)


OF_SEVERAL_KEYS: list[tuple[str, list[str]]] = [
    ("signal=B:USR1@120", ["job.stop_signal, its seconds become job.grace", "job.grace"]),
    ("gres=gpu:a100:4,nvme:1",
     ["job.gpus, requested by gres", "target.gpu_type", "target.gpu_request", "target.extra"]),
]  # fmt: skip


@pytest.mark.parametrize(("option", "rows"), OF_SEVERAL_KEYS, ids=[option for option, _ in OF_SEVERAL_KEYS])
def test_a_note_is_in_the_row_of_its_own_key(option: str, rows: list[str], tmp_path: Path) -> None:
    migration = migrated(tmp_path, f"#!/bin/bash\n#SBATCH --{option}\n")
    assert [became for _, _, became in migration.rows()] == rows


def test_a_file_without_a_script_says_that_nothing_is_launched(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=4\n")
    done = in_process("init", "--from", "hosts", cwd=tmp_path)
    assert done.returncode == 0
    assert_names(done.stderr, "command")


# The command, and the flags, the variables and the program that it becomes.
TRANSLATIONS: list[tuple[str, dict[str, str], dict[str, str], str]] = [
    ("torchrun --nproc_per_node=2 train.py --lr 0.1", {"--gpus": "2"}, {}, "train.py --lr 0.1"),
    ("python -m torch.distributed.run --master_port 29501 train.py", {"--port": "29501"}, {}, "train.py"),
    ("accelerate launch --num_machines 2 --num_processes 8 t.py", {"--nodes": "2", "--gpus": "4"}, {}, "t.py"),
    ("accelerate launch --mixed_precision bf16 t.py", {}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "t.py"),
    ("deepspeed --num_nodes=2 --num_gpus=4 train.py --deepspeed ds.json", {"--nodes": "2", "--gpus": "4"}, {},
     "train.py --deepspeed ds.json"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "flags", "env", "program"), TRANSLATIONS, ids=[row[0] for row in TRANSLATIONS])
def test_options_become_flags(command: str, flags: dict[str, str], env: dict[str, str], program: str) -> None:
    translation = translate(command.split())
    assert translation
    assert (translation.flags, translation.env, translation.program) == (flags, env, tuple(program.split()))


@pytest.mark.parametrize("command", ["", "train.py", "python train.py", "-m torchrun_like", "--epochs 3", "ddptrain"])
def test_other_commands_are_left_alone(command: str) -> None:
    assert translate(command.split()) is None


@pytest.mark.parametrize(
    ("command", "fact"),
    [
        ("torchrun --tee 3 train.py", "--tee"),
        ("--no-python sh -c true", "--no-python"),
        ("mpirun -np 2 train.py", "mpirun"),
        ("srun train.py", "srun"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_by_name(command: str, fact: str) -> None:
    with refused(UsageError, fact):
        translate(command.split())
