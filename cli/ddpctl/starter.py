"""The ddpctl.yaml that ``ddpctl init`` writes: a text from what the machine has. Pure."""

from dataclasses import fields
from typing import get_args

from ddpctl.spec import Doc, JobSpec

# Every one of them is read again without its "# " by a test.
_ELSEWHERE = """\
  # boxes: # machines with SSH and Docker
  #   kind: ssh
  #   hosts: [alice@box1, alice@box2]
  # hpc: # from a login node, or with login: of this machine
  #   kind: slurm
  #   partition: gpu
  #   account: my-lab
  # cluster:
  #   kind: kubernetes
  #   namespace: ml
  # t4s: # two T4s of Kaggle, with its client
  #   kind: kaggle
  #   datasets: [someone/their-pictures]
"""


def text(*, gpus: int, cores: int) -> str:
    """A commented configuration for a machine with so many GPUs and CPU cores."""
    ranks = gpus or max(1, min(2, cores))
    machine = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else f"no GPU, {cores} CPU cores"
    values = {
        "name": "train",
        "nodes": "1",
        "gpus": str(ranks),
        "device": "auto",
        "command": "[]  # for example [train.py, --epochs, 3]",
        "env": "{}  # for example {OMP_NUM_THREADS: 1}",
    }
    job = "".join(f"  # {_doc(name)}\n  {name}: {value}\n" for name, value in values.items())
    others = ", ".join(item.name for item in fields(JobSpec) if item.name not in values)
    return f"""\
# What to train and where, for: ddpctl launch. Written by ddpctl init for this machine: {machine}.
# A flag wins over a DDPCTL_* variable, that over this file. ddpctl schema prints all of its words.

job:
{job}  # Also: {others}.

# Where it may run: --target takes one of these names; this one is taken when none is given.
target: here
targets:
  here:
    kind: local
{_ELSEWHERE}
# Other settings of the job by name: ddpctl launch --profile quick
profiles:
  quick:
    gpus: 1
"""


def _doc(name: str) -> str:
    annotation = JobSpec.__annotations__[name]
    return next(part.text for part in get_args(annotation) if isinstance(part, Doc))
