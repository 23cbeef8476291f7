"""What is where in a run's folder, and how a file in it is written.

RUN/                       beside it .targets/, with the runs' metrics addresses (ddpwire.targets)
  run.json                 ddpctl's record (ddpctl alone reads and writes it)
  checkpoints/             the script's, named to it by DDP_CHECKPOINT_DIR
  node-0/
    ddprun.lock            held locked by the node's ddprun for as long as it lives
    node.json              who and where the node is: pid, state, metrics address, ranks
    node.log               everything the node said, each line with its node and rank
    events.jsonl           what happened, an event a line (ddpwire.events); events.1.jsonl: those before them
    rank-1.log             what rank 1 wrote to stdout and stderr
    history.csv            how its training went, a row every few seconds (ddpwire.history)
    environment.json       what machine and what builds it had
    metrics/rank-1/        prometheus_client's files of rank 1
    heartbeat/rank-1       rank 1's last step in the present attempt (ddpwire.heartbeat)
    stacks-attempt-2.txt   where the ranks were when one of them hung in attempt 2
    metrics.prom           what /metrics said last, in the form of node_exporter's textfile collector
    outcome.json           how it ended; there once ddprun has ended by itself
"""

import os
import tempfile
from pathlib import Path

CHECKPOINTS = "checkpoints"
RECORD = "run.json"  # ddpctl's; its "checkpoint_dir" says where the checkpoints are, which a resumed run shares
LOCK = "ddprun.lock"
NODE = "node.json"
NODE_LOG = "node.log"
METRICS = "metrics"
SNAPSHOT = "metrics.prom"
HEARTBEAT = "heartbeat"
OUTCOME = "outcome.json"
ENVIRONMENT = "environment.json"


def node_name(node: int) -> str:
    """The folder of a node inside its run's folder."""
    return f"node-{node}"


def rank_log(rank: int) -> str:
    """The log of a rank inside its node's folder."""
    return f"rank-{rank}.log"


def rank_metrics(rank: int) -> str:
    """Where prometheus_client keeps what a rank counts, inside its node's folder."""
    return f"{METRICS}/rank-{rank}"


def rank_heartbeat(rank: int) -> str:
    """The heartbeat of a rank inside its node's folder."""
    return f"{HEARTBEAT}/rank-{rank}"


def stacks_of(attempt: int) -> str:
    """Where the ranks were when one hung, inside their node's folder."""
    return f"stacks-attempt-{attempt}.txt"


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` so that a reader sees the old file or the whole new one, also after a crash.

    A temporary file beside it, fsync, rename, fsync of the folder. Raises OSError and leaves
    nothing behind.
    """
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
