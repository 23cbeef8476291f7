"""The command line of one node's container under docker or podman. Pure; knows no target.

The container may do little: no capability, no new privilege, a read-only root. What the node writes lies in its run's
folder, which is a folder of the machine and belongs to ``user``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ddpctl.errors import ConfigError
from ddpctl.images import Engine
from ddpctl.plan import Plan, ddprun_args
from ddpctl.spec import size_bytes
from ddpwire import names
from ddpwire.folder import NODE_LOG, node_name

RUN_LABEL, NODE_LABEL = "ddpctl.run", "ddpctl.node"
WORKSPACE = "/workspace"  # the image's own working folder, where a project's folder is mounted
RUNS = "/runs"
# A user without an entry in the image's passwd has neither; libraries ask for both.
DEFAULTS = {"HOME": "/tmp", "USER": "ddp"}  # noqa: S108 -- the container's own, a tmpfs
# What a node says goes to its log in the run's folder: the container can be removed when it ends.
_INTO_LOG = f'exec ddprun "$@" >>"${names.RUN_DIR}/{node_name(0)[:-1]}${names.NODE_RANK}/{NODE_LOG}" 2>&1'


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where and as what one node's container runs."""

    engine: Engine
    node: int
    image: str
    user: str  # uid:gid; the owner of the run's folder
    run_dir: str  # on the machine
    gpus: tuple[str, ...] = ()  # UUIDs
    network: str = "host"
    project: str | None = None  # a folder of the machine; None: what the image has
    checkpoints: str | None = None  # a folder of the machine; None: in the run's folder


def container_name(run: str, node: int) -> str:
    """``ddpctl-night-0``."""
    return f"ddpctl-{run}-{node}"


def run_args(plan: Plan, node: Node, *, env_file: str) -> tuple[str, ...]:
    """``docker run`` of a node, detached; it is gone with its ddprun. ``env_file``: its environment."""
    job = plan.job
    options = [
        "--detach",
        "--rm",
        "--init",
        f"--name={container_name(plan.run, node.node)}",
        f"--label={RUN_LABEL}={plan.run}",
        f"--label={NODE_LABEL}={node.node}",
        f"--network={node.network}",
        f"--user={node.user}",
        f"--env-file={env_file}",
        f"--shm-size={size_bytes(job.shm_size)}",
        *confined(),
        f"--volume={node.run_dir}:{plan.run_dir}",
    ]
    if node.checkpoints:
        options.append(f"--volume={node.checkpoints}:{plan.checkpoint_dir}")
    if node.project:
        options += [f"--volume={node.project}:{WORKSPACE}", f"--workdir={WORKSPACE}"]
    options += [f"--volume={mount}" for mount in job.mounts]
    options += _devices(node)
    if job.cpus is not None:
        options.append(f"--cpus={job.cpus}")
    if job.memory is not None:
        options += [f"--memory={size_bytes(job.memory)}"]
    if node.engine == "podman":
        options.append("--userns=keep-id")  # else the folder's owner is nobody inside
    start = ("--entrypoint=/bin/sh", node.image, "-c", _INTO_LOG, "ddprun", *ddprun_args(plan))
    return (node.engine, "run", *options, *start)


def confined() -> tuple[str, ...]:
    """What no container of ours may do."""
    return (
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--read-only",
        "--tmpfs=/tmp:rw,exec,nosuid,nodev",  # exec: torch.compile loads what it has built there
    )


def _devices(node: Node) -> list[str]:
    """The GPUs, and with them no limit on the memory that NCCL may lock; a rootless engine could not lift it."""
    if not node.gpus:
        return []
    if node.engine == "podman":
        devices = [f"--device=nvidia.com/gpu={gpu}" for gpu in node.gpus]
    else:
        devices = [f'--gpus="device={",".join(node.gpus)}"']
    return [*devices, "--ulimit=memlock=-1:-1"]


def env_file(env: Mapping[str, str]) -> str:
    """The environment as the engines read it from a file. Raises ConfigError for what such a file cannot hold."""
    for name, value in env.items():
        if "\n" in value or "\r" in value:
            raise ConfigError(f"env: {name} holds a line's end, which a container's environment file cannot: encode it")
    return "".join(f"{name}={value}\n" for name, value in env.items())
