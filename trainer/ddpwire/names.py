"""The names of the environment variables that the programs use to pass values to each other.

torchrun reads ``PET_*``, and Kubeflow's operators set them. The ranks' variables are those of torchrun:
https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables. ``DDP_*`` are this project's own.
"""

import re
from typing import Final

# A node's place in the run: set by the program that starts the node, read by ddprun.
NNODES: Final = "PET_NNODES"  # "2", or "1:4" for a job that may shrink
NPROC_PER_NODE: Final = "PET_NPROC_PER_NODE"
NODE_RANK: Final = "PET_NODE_RANK"
NODE_MASTER_ADDR: Final = "PET_MASTER_ADDR"
NODE_MASTER_PORT: Final = "PET_MASTER_PORT"

# A rank's place in the run: set by ddprun (or torchrun), read by any script.
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"
RANK: Final = "RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_RANK: Final = "LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_RANK: Final = "GROUP_RANK"
GROUP_WORLD_SIZE: Final = "GROUP_WORLD_SIZE"
RANKS_NODE: Final = "NODE_RANK"
ERROR_FILE: Final = "TORCHELASTIC_ERROR_FILE"  # where a rank writes its error (ddpwire.run_files)

# The run: set by ddpctl, read by ddprun and passed on to the ranks.
RUN_ID: Final = "DDP_RUN_ID"
RUN_UID: Final = "DDP_RUN_UID"  # distinguishes runs of the same name; unset: ddprun makes one
USER: Final = "DDP_USER"  # who launched the run; unset: the user that ddprun runs as
PROJECT: Final = "DDP_PROJECT"  # whose work it is: set by the user, for Prometheus
RUN_DIR: Final = "DDP_RUN_DIR"  # the run's folder as this node sees it; ddpwire.run_files lists its files
CHECKPOINT_DIR: Final = "DDP_CHECKPOINT_DIR"
CHECKPOINT_STORE: Final = "DDP_CHECKPOINT_STORE"  # URL of the object store that gets a copy of each checkpoint
JOB_ENV: Final = "DDP_JOB_ENV"  # the variables of the job's env, as a JSON object (ddpwire.job_env)
SECRET_FILE: Final = "DDP_SECRET_FILE"  # noqa: S105 -- has the secret with which the nodes sign values
DEVICE: Final = "DDP_DEVICE"  # auto, cuda or cpu
IMAGE: Final = "DDP_IMAGE"  # the container image that a node runs in, with its digest; the nodes compare it
NODE_REPLACED: Final = "DDP_NODE_REPLACED"  # 1: a controller replaces a node that ends
NODES_HERE: Final = "DDP_NODES_HERE"  # how many nodes of the run share this machine's cores; unset: one
DEADLINE: Final = "DDP_DEADLINE"  # when a node must have ended: seconds from the start, or an ISO time
ONE_PORT: Final = "DDP_ONE_PORT"  # 1: the ranks also meet on the master port; for checks of a network
REHEARSAL: Final = "DDP_REHEARSAL"  # what the observer in the ranks does, as JSON: only under ddpctl rehearse
ATTEMPT: Final = "DDP_ATTEMPT"  # 1 for the first start of the ranks
EXIT_CODE: Final = "DDP_EXIT_CODE"  # for node_teardown: the exit code of the run
NOTICE: Final = "DDP_NOTICE"  # for a command of notify: the event, its text, and the title of a message about it
NOTICE_TEXT: Final = "DDP_NOTICE_TEXT"
NOTICE_TITLE: Final = "DDP_NOTICE_TITLE"
NOTICE_ADDRESS: Final = "DDP_NOTICE_ADDRESS"  # for the process that sends a notice with apprise
LIFELINE_FD: Final = "DDP_LIFELINE_FD"  # a pipe's read end: when it is closed, ddprun saves and stops
METRICS_HOST: Final = "DDP_METRICS_HOST"
METRICS_PORT: Final = "DDP_METRICS_PORT"  # 0: a free one
TARGETS_DIR: Final = "DDP_TARGETS_DIR"  # where a node writes its own file for Prometheus' file_sd (ddpwire.run_files)
LAUNCHER: Final = "DDP_LAUNCHER"  # the value of the label ``launcher`` in that file
PUSHGATEWAY: Final = "DDP_PUSHGATEWAY"  # URL of a Pushgateway, to which node 0 pushes how the run ended

# What happened before this start of the ranks, to count what was lost: set by ddprun for each rank.
STEPS_BEFORE: Final = "DDP_STEPS_BEFORE"  # the highest step of all earlier attempts; unset: none
LOST_BEFORE: Final = "DDP_LOST_BEFORE"  # seconds lost per cause since the last training: rendezvous=0.4,restart=1.2,
AT: Final = "at"  # and the time.monotonic() up to which they count: at=81234.5
SPENT_BEFORE: Final = "DDP_SPENT_BEFORE"  # the rank's seconds in all earlier starts: productive=81.2,startup=1.5

# prometheus_client's own: where a process keeps the files that ddprun collects.
PROMETHEUS_MULTIPROC_DIR: Final = "PROMETHEUS_MULTIPROC_DIR"

NOTICE_VARIABLE: Final = r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?"  # has the address of a notice
ADDRESS_PATTERN: Final = r"\s*[A-Za-z][A-Za-z0-9+.-]*://\S+\s*"  # of a notice: it may be secret
NODES_PATTERN: Final = r"([1-9][0-9]{0,3})(?::([1-9][0-9]{0,3}))?"


def node_range(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of PET_NNODES, ``N`` or ``MIN:MAX``. Raises ValueError."""
    match = re.fullmatch(NODES_PATTERN, text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ValueError("expected a number of nodes, or MIN:MAX such as 1:4")
    return int(match[1]), int(match[2] or match[1])
