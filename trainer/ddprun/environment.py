"""The environment of a rank: what torchrun would set, what is ours, and nothing that would mislead the script. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddprun.share import Share
from ddpwire import kaggle, names
from ddpwire.events import EVENTS, EVENTS_FILE
from ddpwire.folder import CHECKPOINTS, rank_heartbeat, rank_metrics
from ddpwire.heartbeat import HEARTBEAT_FILE

# This node's place. A launcher that the script starts in turn must not take it for its own.
NOT_FOR_RANKS = (
    names.DEADLINE,
    names.LIFELINE_FD,
    names.METRICS_HOST,
    names.METRICS_PORT,
    names.NODES_HERE,
    names.PUSHGATEWAY,
    names.TARGETS_DIR,
    names.LAUNCHER,
    names.STEPS_BEFORE,
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands in its attempt."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    role_rank: int
    role_world_size: int
    node_rank: int  # the contract's
    group_rank: int  # dense over the nodes that take part
    group_world_size: int
    master_addr: str  # of the attempt's own store
    master_port: int
    attempt: int


def place(group: Any, worker: Any, node_rank: int, attempt: int) -> Place:
    """The place of one of the workers of torch elastic's group."""
    return Place(
        rank=worker.global_rank,
        world_size=worker.world_size,
        local_rank=worker.local_rank,
        local_world_size=group.spec.local_world_size,
        role_rank=worker.role_rank,
        role_world_size=worker.role_world_size,
        node_rank=node_rank,
        group_rank=group.group_rank,
        group_world_size=group.group_world_size,
        master_addr=group.master_addr,
        master_port=group.master_port,
        attempt=attempt,
    )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What all ranks of a node share."""

    run_id: str
    run_dir: Path | None
    checkpoint_dir: str | None
    max_restarts: int
    share: Share  # of this machine's cores
    interface: str | None  # that leads to node 0; the loopback's when all nodes are on this machine


@dataclass(frozen=True, kw_only=True)
class Past:
    """What went before an attempt, for who counts what was lost."""

    step: int | None  # the highest of all attempts before
    lost: str  # as ddpwire.names.LOST_BEFORE has it


def of_rank(place: Place, around: Surroundings, past: Past, node_dir: Path, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the rank at ``place``, made from ddprun's own, ``base``."""
    env = {key: value for key, value in base.items() if not key.startswith("PET_") and key not in NOT_FOR_RANKS}
    env |= {
        names.RANK: str(place.rank),
        names.WORLD_SIZE: str(place.world_size),
        names.LOCAL_RANK: str(place.local_rank),
        names.LOCAL_WORLD_SIZE: str(place.local_world_size),
        names.GROUP_RANK: str(place.group_rank),
        names.GROUP_WORLD_SIZE: str(place.group_world_size),
        names.RANKS_NODE: str(place.node_rank),
        names.MASTER_ADDR: place.master_addr,
        names.MASTER_PORT: str(place.master_port),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.role_rank),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "TORCHELASTIC_RUN_ID": around.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(place.attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(around.max_restarts),
        # A rank that is alone serves its own store, as does whatever it spawns, at whatever address it chooses.
        "TORCHELASTIC_USE_AGENT_STORE": str(place.world_size > 1),
        names.RUN_ID: around.run_id,
        names.ATTEMPT: str(place.attempt),
        names.PROMETHEUS_MULTIPROC_DIR: str(node_dir / rank_metrics(place.rank)),
        HEARTBEAT_FILE: str(node_dir / rank_heartbeat(place.rank)),
        EVENTS_FILE: str(node_dir / EVENTS),
        names.LOST_BEFORE: past.lost,
        "PYTHONUNBUFFERED": "1",  # else the last words of a killed rank are lost
    }
    defaults = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(node_dir / f"flight-recorder-attempt-{place.attempt}-rank-"),
        "PYTHONFAULTHANDLER": "1",  # a crash, and a hang (stacks.py), show where it was
        "OMP_NUM_THREADS": str(around.share.threads),
    }
    if past.step is not None:
        env[names.STEPS_BEFORE] = str(past.step)
    if around.interface:
        # gloo would take the hostname's address, which is 127.0.1.1 on Debian and nothing on many a laptop; NCCL the
        # first interface by name. Its "=" means this name, and not every name that begins with it.
        defaults |= {"GLOO_SOCKET_IFNAME": around.interface, "NCCL_SOCKET_IFNAME": f"={around.interface}"}
    if kaggle.session(base):
        defaults |= kaggle.NCCL
    if around.run_dir:
        env[names.RUN_DIR] = str(around.run_dir)
        defaults[names.CHECKPOINT_DIR] = around.checkpoint_dir or str(around.run_dir / CHECKPOINTS)
    return defaults | env
