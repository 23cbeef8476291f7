"""What the runtimes share: the names of variables, the folders, and how long lines are broken. Pure text.

A container sees the project as /workspace and the run's folders under their own paths; its network is the node's. Every
variable that it is to have is named: an image's own environment may win, and no value shall stand in an argument.
"""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from ddpctl.spec import JobSpec
from ddpwire import names

WORKSPACE = "/workspace"
HANDED_IN = (
    names.NNODES, names.NPROC_PER_NODE, names.NODE_RANK, names.NODE_MASTER_ADDR, names.NODE_MASTER_PORT,
    names.RUN_DIR, names.CHECKPOINT_DIR, names.DEVICE, names.IMAGE, "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID",
    "SLURM_RESTART_COUNT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
BREAK = " \\\n    "
WIDTH = 96
PLAIN = """\
export PET_NODE_RANK=$SLURM_NODEID
[ "$SLURM_PROCID" != 0 ] || echo "$SLURM_STEP_ID" >"$DDP_RUN_DIR/step"
"""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The pieces of a script that differ."""

    setup: str = ""  # on the head node, before all
    needs: str = ""  # on every node: a test that says what is missing
    on_node: str  # what a task of srun does with its arguments
    srun: str = ""  # further options of srun
    words: str  # what stands before ddprun's own arguments
    reader: str = "bash"  # what reads on_node


def handed_in(job: JobSpec) -> tuple[str, ...]:
    """The names of all variables that a container is given."""
    return tuple(dict.fromkeys((*HANDED_IN, *job.env, *job.secrets)))


def mounts(job: JobSpec) -> tuple[str, ...]:
    """Words for bash, which fills in what is its own; what follows needs no quotes beside them."""
    own = (f"$workdir:{WORKSPACE}", "$run_dir:$run_dir", "$DDP_CHECKPOINT_DIR:$DDP_CHECKPOINT_DIR")
    return (*(f'"{mount}"' for mount in own), *map(shlex.quote, job.mounts))


def lines(words: Iterable[str]) -> tuple[str, ...]:
    """Words as lines of a bearable length."""
    made = [""]
    for word in words:
        if made[-1] and len(made[-1]) + len(word) > WIDTH:
            made.append("")
        made[-1] += f" {word}" if made[-1] else word
    return tuple(made)
