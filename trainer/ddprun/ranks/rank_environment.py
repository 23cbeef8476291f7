"""What each rank gets from its node: environment variables, a number of threads, and the cores that it may use.

``allocate_resources`` is called before the fork. ``rank_environment`` is pure: it sets torchrun's and ddprun's own
variables, and removes those that would mislead the script.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddprank.heartbeat import HEARTBEAT_FILE
from ddprun.files.node_dir import Node
from ddprun.files.run_identity import PROCESS_TOKEN
from ddprun.settings.node_config import CUDA_VISIBLE_DEVICES, DEFAULT_RUN_ID, NodeConfig
from ddprun.system import machine
from ddpwire import kaggle, names
from ddpwire.events import EVENTS, EVENTS_FILE
from ddpwire.machine import format_ranges, usable_cores
from ddpwire.run_files import CHECKPOINTS, rank_error, rank_heartbeat, rank_metrics


@dataclass(frozen=True, kw_only=True)
class ResourceAllocation:
    """The share of this machine that each rank of this node gets."""

    threads: int  # OMP_NUM_THREADS, the same for all ranks: the process from which they are forked has read it
    bound: tuple[machine.Cores, ...]  # indexed by local rank; empty if a rank may run on all cores of this node

    def cores(self, local_rank: int) -> machine.Cores:
        """Return the cores that the rank is bound to, or an empty set if it is not bound."""
        return self.bound[local_rank] if self.bound else frozenset()


def allocate_resources(
    config: NodeConfig, environ: Mapping[str, str], sysfs: Path = machine.SYSFS
) -> ResourceAllocation:
    """Divide the cgroup's quota and the affinity mask evenly among the ranks."""
    threads = usable_cores() // config.nodes_here // config.local_world_size
    is_on_gpus = environ.get(names.DEVICE) != "cpu"
    bound: tuple[machine.Cores, ...] = ()
    if config.nodes_here == 1:  # else the ranks of other nodes would be bound to the same cores
        find_gpus = machine.pci_addresses if is_on_gpus else tuple
        bound = machine.plan_affinity(config.numa_binding, config.local_world_size, find_gpus, environ, sysfs)
    return ResourceAllocation(threads=max(1, min([threads, *map(len, bound)])), bound=bound)


def describe_allocation(config: NodeConfig, resources: ResourceAllocation) -> str:
    """Describe the binding in one line, or return an empty string if there is nothing to log."""
    mode = config.numa_binding
    if resources.bound:
        bound = enumerate(resources.bound)
        return "; ".join(f"local rank {rank} on cores {format_ranges(cores)}" for rank, cores in bound)
    if mode in (None, "none"):
        return ""
    reason = "there are fewer cores than ranks, or the NUMA nodes of this machine are unknown"
    if config.nodes_here > 1:
        reason = f"{config.nodes_here} nodes share this machine's cores"
    return f"--numa-binding {mode} has no effect: {reason}"


# This node's own settings: a launcher that the script starts must not use them.
NOT_FOR_RANKS = (
    names.DEADLINE,
    names.LIFELINE_FD,
    names.METRICS_HOST,
    names.METRICS_PORT,
    names.NODE_REPLACED,
    names.NODES_HERE,
    names.ONE_PORT,
    names.PUSHGATEWAY,
    names.SECRET_FILE,
    names.TARGETS_DIR,
    names.LAUNCHER,
    names.STEPS_BEFORE,
    names.SPENT_BEFORE,
)


def node_environment(config: NodeConfig, base: Mapping[str, str]) -> dict[str, str]:
    """Return what all programs of the job on this node have in their environment. ``base``: ddprun's own one."""
    if base.get(names.DEVICE) == "cpu":  # Slurm unsets the variable in a job without GPUs, so all GPUs may be visible
        base = {**base, CUDA_VISIBLE_DEVICES: ""}
    env = {key: value for key, value in base.items() if not key.startswith("PET_") and key not in NOT_FOR_RANKS}
    env |= {names.RUN_ID: config.run_id, names.RANKS_NODE: str(config.node_rank)}
    programs = str(Path(sys.executable).parent)  # such as ninja, in an environment that is not activated
    if programs not in base.get("PATH", os.defpath).split(os.pathsep):
        env["PATH"] = os.pathsep.join((programs, base.get("PATH") or os.defpath))
    if config.run_dir:
        env[names.RUN_DIR] = str(config.run_dir)
        env.setdefault(names.CHECKPOINT_DIR, config.checkpoint_dir or str(config.run_dir / CHECKPOINTS))
    return env


def rank_environment(
    group: Any,
    worker: Any,
    node: Node,
    base: Mapping[str, str],
    *,
    attempt: int,
    steps_before: int | None,
    lost: str,
    spent: str,
    threads: int,
    interface: str | None,
) -> dict[str, str]:
    """Return a rank's environment, made from ``base``, which is ddprun's own environment.

    ``worker`` is the rank in torch elastic's ``group``. The group has the address and the port of the attempt's store.
    ``steps_before`` is the highest step of all previous attempts. ``lost`` is the time since ranks last trained, in the
    format of names.LOST_BEFORE. ``spent`` are the seconds of the rank's earlier processes, in the format of
    names.SPENT_BEFORE, or "". The ranks use all three for their goodput.
    ``interface`` is the network interface to node 0, or the loopback interface if all nodes are on this machine.
    """
    config, node_dir, runtime = node.config, node.folder.path, node.folder.runtime.path
    rank, world_size, local_rank = worker.global_rank, worker.world_size, worker.local_rank
    env = node_environment(config, base) | {
        names.RANK: str(rank),
        names.WORLD_SIZE: str(world_size),
        names.LOCAL_RANK: str(local_rank),
        names.LOCAL_WORLD_SIZE: str(config.local_world_size),
        names.GROUP_RANK: str(group.group_rank),
        names.GROUP_WORLD_SIZE: str(group.group_world_size),
        names.MASTER_ADDR: str(group.master_addr),
        names.MASTER_PORT: str(group.master_port),
        "ROLE_NAME": config.role,
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        # As in torchrun: a single node without a run id makes one. Several nodes cannot agree on one here.
        "TORCHELASTIC_RUN_ID": PROCESS_TOKEN
        if config.run_id == DEFAULT_RUN_ID and config.max_nodes == 1
        else config.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
        "TORCHELASTIC_MAX_RESTARTS": str(config.max_restarts),
        # A single rank, or the processes that it spawns, serve their own store at an address of their choice.
        "TORCHELASTIC_USE_AGENT_STORE": str(world_size > 1),
        names.ATTEMPT: str(attempt),
        names.PROMETHEUS_MULTIPROC_DIR: str(runtime / rank_metrics(rank)),
        HEARTBEAT_FILE: str(runtime / rank_heartbeat(rank)),
        EVENTS_FILE: str(node_dir / EVENTS),
        names.ERROR_FILE: str(node_dir / rank_error(rank)),
        names.LOST_BEFORE: lost,
    }
    if config.virtual_local_rank:
        visible = env.get(CUDA_VISIBLE_DEVICES)
        own = str(local_rank) if visible is None else visible and visible.split(",")[local_rank].strip()
        env |= {names.LOCAL_RANK: "0", CUDA_VISIBLE_DEVICES: own}
    defaults = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's order; CUDA's own order puts the fastest GPU first
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(node_dir / f"flight-recorder-attempt-{attempt}-rank-"),
        "PYTHONFAULTHANDLER": "1",  # a crash or a hang (heartbeat_monitor.py) prints the stacks
        "OMP_NUM_THREADS": str(threads),
    }
    if "TORCH_NCCL_TRACE_BUFFER_SIZE" not in env:  # the old name, which torch reads as well
        defaults["TORCH_FR_BUFFER_SIZE"] = "2000"  # the default of torch 2.15; that of 2.10 is 0: explain sees nothing
    if steps_before is not None:
        env[names.STEPS_BEFORE] = str(steps_before)
    if spent:
        env[names.SPENT_BEFORE] = spent
    if interface:
        # gloo would take the hostname's address, which is 127.0.1.1 on Debian and missing on many laptops; NCCL would
        # take the first interface by name. NCCL's "=" means exactly this name, not every name with this prefix.
        defaults |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if kaggle.session(base):
        defaults |= kaggle.NCCL
    return defaults | env
