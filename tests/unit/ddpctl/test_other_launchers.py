"""What a command line of another launcher becomes."""

import pytest
from tests.messages import refused

from ddpctl.errors import UsageError
from ddpctl.job.other_launchers import translate

# The command, and the flags, the variables and the program that it becomes.
TRANSLATIONS: list[tuple[str, dict[str, str], dict[str, str], str]] = [
    ("torchrun --nproc_per_node=2 train.py --lr 0.1", {"--gpus": "2"}, {}, "train.py --lr 0.1"),
    ("torchrun --nnodes 1:4 --nproc 8 -m pkg.train", {"--nodes": "1:4", "--gpus": "8"}, {}, "-m pkg.train"),
    ("torchrun train.py --nproc-per-node 2", {}, {}, "train.py --nproc-per-node 2"),
    ("torchrun --standalone --rdzv-id 7 --max-restarts 3 train.py", {"--max-restarts": "3"}, {}, "train.py"),
    ("python -m torch.distributed.run --master_port 29501 train.py", {"--port": "29501"}, {}, "train.py"),
    ("python3 -m torch.distributed.launch --use_env train.py", {}, {}, "train.py"),
    ("--nproc-per-node 2 train.py", {"--gpus": "2"}, {}, "train.py"),
    ("accelerate launch --num_machines 2 --num_processes 8 t.py", {"--nodes": "2", "--gpus": "4"}, {}, "t.py"),
    ("accelerate launch --cpu --multi_gpu t.py", {"--device": "cpu"}, {}, "t.py"),
    ("accelerate launch --mixed_precision bf16 t.py", {}, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "t.py"),
    ("python -m deepspeed.launcher.runner --num_gpus 2 t.py", {"--gpus": "2"}, {}, "t.py"),
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
        ("torchrun --rdzv train.py", "train.py"),  # it means the value of an ambiguous option that ddpctl leaves out
        ("torchrun --n 2 train.py", "--n"),
        ("torchrun --nproc-per-node gpu train.py", "--gpus"),
        ("torchrun --nproc-per-node 2", "torchrun"),
        ("torchrun --nproc-per-node", "--nproc-per-node"),
        ("--no-python sh -c true", "--no-python"),
        ("accelerate launch --config_file c.yaml t.py", "--config_file"),
        ("accelerate launch --num_machines 2 --num_processes 3 t.py", "--num_machines"),
        ("mpirun -np 2 train.py", "mpirun"),
        ("srun train.py", "srun"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_by_name(command: str, fact: str) -> None:
    with refused(UsageError, fact):
        translate(command.split())
