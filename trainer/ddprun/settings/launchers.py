"""Reads a node's settings from the environment of its launcher, with one function per launcher.

Each setting includes its source for error messages (node_config.py). If several sources set a value, the first of these
counts: flags, PET_* (ddpctl, Kubeflow), Slurm, an elastic PyTorchJob, an Indexed Job, RANK and WORLD_SIZE, Kaggle.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from ddprun.system import machine
from ddprun.system.errors import config_error, node_error
from ddprun.system.network import FREE_PORT_RANGE
from ddpwire import names
from ddpwire.exits import Exit

# The settings with their own flag and variable of torchrun, such as --node-rank and PET_NODE_RANK.
TorchrunSetting = Literal[
    "nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "rdzv_id", "max_restarts", "local_addr",
    "rdzv_backend", "role", "redirects", "tee", "local_ranks_filter", "virtual_local_rank", "run_path", "no_python",
    "module",
]  # fmt: skip
Setting = TorchrunSetting | Literal["is_host", "join_timeout"]
Settings = dict[Setting, tuple[str, str]]  # setting → (its source, its text)
C10D = "c10d"  # the torchrun backend that needs no node numbers
ONLY_ONE = "give only one of these two settings"
SLURM_NO_SRUN = 4_294_967_290  # this and higher step ids mean the batch script or salloc's shell


def read_settings(options: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    """Return all settings in flags and environment variables. Raises NodeError."""
    flags = _from_torchrun(lambda name: (f"--{name.replace('_', '-')}", getattr(options, name)))
    known = from_pet(environ) | flags
    for launcher in (from_slurm, from_elastic_pod, from_indexed_job, from_plain, from_kaggle):
        known = launcher(environ, known) | known
    return known


def join_timeout_s(environ: Mapping[str, str], *, on_one_machine: bool) -> float:
    """Return how many seconds to wait for other nodes, which depends on the time that the launcher may need."""
    if on_one_machine:
        return 30.0
    if "KUBERNETES_SERVICE_HOST" in environ:
        return 1200.0 if "JOB_COMPLETION_INDEX" in environ else 600.0  # a Job delays new pods by up to 600 s
    return 300.0 if "SLURM_JOB_ID" in environ else 60.0


def from_pet(environ: Mapping[str, str]) -> Settings:
    """Return the settings from torchrun's variables, which ddpctl and Kubeflow's operators set, and from DDP_RUN_ID."""
    settings = _from_torchrun(lambda name: (f"PET_{name.upper()}", environ.get(f"PET_{name.upper()}")))
    return settings | ({"rdzv_id": (names.RUN_ID, environ[names.RUN_ID])} if environ.get(names.RUN_ID) else {})


def _from_torchrun(lookup: Callable[[str], tuple[str, Any]]) -> Settings:
    settings: Settings = {}
    source, endpoint = lookup("rdzv_endpoint")
    if endpoint:
        host, _, port = endpoint.rpartition(":")
        if (not host or endpoint.endswith("]")) and lookup("rdzv_backend")[1] == C10D:
            host, port = endpoint, "29400"  # torchrun's default
        if not host:
            raise config_error(f"{source} is {endpoint!r}: expected HOST:PORT")
        settings |= {"master_addr": (source, host.strip("[]")), "master_port": (source, port)}
    for setting in get_args(TorchrunSetting):
        source, text = lookup(setting)
        if text:
            settings[setting] = (source, "1" if text is True else text)  # a switch is True
    settings = _from_rdzv_conf(*lookup("rdzv_conf"), settings) | settings
    source, alone = lookup("standalone")
    if alone and alone != "0":
        if settings.get("nnodes", ("", "1"))[1] not in ("1", "1:1"):
            message = f"{source} means one node, but {' is '.join(settings['nnodes'])}"
            raise config_error(message, hint=ONLY_ONE)
        place: Settings = {"nnodes": (source, "1"), "node_rank": (source, "0")}
        settings = place | {"master_addr": (source, "127.0.0.1"), "master_port": (source, "0")} | settings
    return settings


def _from_rdzv_conf(source: str, text: str | None, known: Settings) -> Settings:
    """Return the settings from --rdzv-conf, such as ``is_host=1,join_timeout=60``. Other keys are ignored."""
    settings: Settings = {}
    for key, _, value in (pair.partition("=") for pair in (text or "").split(",") if pair):
        if key == "is_host" and value.lower() in ("1", "true", "t", "yes", "y"):
            if known.get("node_rank", ("", "0"))[1] != "0":
                message = f"{source} has is_host, so this node is node 0, but {' is '.join(known['node_rank'])}"
                raise config_error(message, hint=ONLY_ONE)
            settings["node_rank"] = (f"{source} is_host", "0")
        elif key == "is_host":
            if value.lower() not in ("0", "false", "f", "no", "n"):
                raise config_error(f"{source} has is_host={value}: expected 1 or 0")
            settings["is_host"] = (f"{source} is_host", "0")
        elif key in ("join_timeout", "timeout"):
            settings["join_timeout"] = (f"{source} {key}", value)
    return settings


def from_slurm(environ: Mapping[str, str], known: Settings) -> Settings:
    """Return the settings of a Slurm step. If a node has several tasks, only the first task starts the ranks."""
    nnodes = environ.get("SLURM_NNODES", "")
    most = known.get("nnodes", ("", nnodes))[1].rpartition(":")[2]
    if not nnodes or "SLURM_JOB_ID" not in environ or most != nnodes:
        return {}
    if slurm_number(environ, "SLURM_STEP_ID", SLURM_NO_SRUN) >= SLURM_NO_SRUN:
        if nnodes != "1" and "node_rank" not in known:
            hint = "use srun --ntasks-per-node=1 ddprun ..., or --nnodes 1 for this node alone"
            raise config_error(f"the Slurm job has {nnodes} nodes, but srun did not start this ddprun", hint=hint)
        return _slurm_local_world_size(environ, 1)
    node = slurm_number(environ, "SLURM_NODEID", 0)
    tasks = slurm_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1")
    num_tasks = tasks[node] if node < len(tasks) else 1
    settings = _slurm_local_world_size(environ, num_tasks)
    if num_tasks > 1:
        if "SLURM_GPUS_PER_TASK" in environ:
            started = f"Slurm started {num_tasks} tasks on this node"
            hint = f"start ddprun with srun --ntasks-per-node=1 --gpus-per-node={num_tasks}"
            raise config_error(f"{started} and SLURM_GPUS_PER_TASK hides their GPUs from each other", hint=hint)
        if environ.get("SLURM_LOCALID", "0") != "0":
            message = f"Slurm started {num_tasks} tasks on this node"
            raise node_error(Exit.OK, "ok", message, hint="the first task starts all ranks, so this task ends")
    settings |= {"nnodes": ("SLURM_NNODES", nnodes), "node_rank": ("SLURM_NODEID", str(node))}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nnodes != "1":
        job = slurm_number(environ, "SLURM_JOB_ID", 0)
        settings["master_port"] = ("SLURM_JOB_ID", str(FREE_PORT_RANGE[job % len(FREE_PORT_RANGE)]))
        if nodes:  # without a list, as in some containers, the batch script has set the address
            settings["master_addr"] = ("SLURM_NODELIST", first_host(nodes))
    return settings


def spans_machines(environ: Mapping[str, str], nnodes: int, master_addr: str) -> bool:
    """Return whether the nodes are on several machines, so that no node 0 is at a loopback address.

    They are if Slurm started them in a step of several nodes. They also are if node 0 is at the address that Debian
    gives a machine's own name: ``hostname --ip-address`` prints it, from which many batch scripts take the address.
    """
    if master_addr == machine.DEBIAN_ADDRESS and nnodes > 1:
        return True
    in_step = slurm_number(environ, "SLURM_STEP_ID", SLURM_NO_SRUN) < SLURM_NO_SRUN
    return in_step and slurm_number(environ, "SLURM_STEP_NUM_NODES", 1) > 1


def slurm_number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in a variable of Slurm, or ``default`` if it is not set. Raises NodeError."""
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise config_error(f"{name} is {text!r}: expected a whole number of at least 0, as Slurm sets it")
    return int(text)


def _slurm_local_world_size(environ: Mapping[str, str], num_tasks: int) -> Settings:
    if num_tasks > 1:
        return {"nproc_per_node": ("SLURM_TASKS_PER_NODE", str(num_tasks))}
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    return {"nproc_per_node": ("SLURM_GPUS_ON_NODE", gpus)} if gpus and gpus != "0" else {}


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: ``gpu[07-09,12],x1`` is ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group() if first else "")


def slurm_tasks(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node: ``2(x3),1`` is 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(tasks) for tasks, times in pairs for _ in range(int(times or 1)))


def from_elastic_pod(environ: Mapping[str, str], known: Settings) -> Settings:
    """Return the node rank of a pod JOB-worker-N of an elastic PyTorchJob, whose endpoint is JOB-worker-0."""
    source, endpoint = known.get("master_addr", ("", ""))
    stem, _, zero = endpoint.partition(".")[0].rpartition("-")
    pod, _, index = environ.get("HOSTNAME", "").rpartition("-")
    if source != "PET_RDZV_ENDPOINT" or not stem or (pod, zero) != (stem, "0"):
        return {}
    return {"node_rank": ("the pod's number in HOSTNAME", index)}


def from_indexed_job(environ: Mapping[str, str], known: Settings) -> Settings:
    """Return the node rank of an Indexed Job's pod. If the number of nodes is not set, the pods are separate runs."""
    index = environ.get("JOB_COMPLETION_INDEX")
    return {"node_rank": ("JOB_COMPLETION_INDEX", index)} if index and "nnodes" in known else {}


def from_plain(environ: Mapping[str, str], known: Settings) -> Settings:
    """Return the settings from MASTER_ADDR and MASTER_PORT. Without a launcher, also use RANK and WORLD_SIZE."""
    variables: dict[Setting, str] = {"master_addr": names.MASTER_ADDR, "master_port": names.MASTER_PORT}
    settings: Settings = {setting: (name, environ[name]) for setting, name in variables.items() if environ.get(name)}
    rank, world_size = environ.get(names.RANK), environ.get(names.WORLD_SIZE)
    has_launcher = "nnodes" in known or "node_rank" in known or any(name.startswith("PET_") for name in environ)
    if has_launcher or "TORCHELASTIC_RUN_ID" in environ or not (rank or world_size):
        return settings  # if a rank started this ddprun, the variables describe that rank
    if not rank or not world_size:
        given, missing = (names.RANK, names.WORLD_SIZE) if rank else (names.WORLD_SIZE, names.RANK)
        raise config_error(f"{given} is set, but {missing} is not: set both, or give --nnodes and --node-rank")
    if known.get("nproc_per_node", ("", "1"))[1] != "1":
        message = f"RANK and WORLD_SIZE are set, so this node has one rank, but {' is '.join(known['nproc_per_node'])}"
        raise config_error(message, hint="unset RANK and WORLD_SIZE, or give --nnodes and --node-rank")
    if environ.get(names.LOCAL_RANK, "0") != "0":
        hint = "start ddprun once per node, not once per rank"
        raise config_error(f"LOCAL_RANK is {environ[names.LOCAL_RANK]}", hint=hint)
    return settings | {"nnodes": (names.WORLD_SIZE, world_size), "node_rank": (names.RANK, rank)}


def from_kaggle(environ: Mapping[str, str], known: Settings) -> Settings:
    """Return the settings of a Kaggle notebook: one node with one rank per GPU."""
    is_kaggle = "KAGGLE_KERNEL_RUN_TYPE" in environ and "nnodes" not in known
    return {"nproc_per_node": ("Kaggle", "auto")} if is_kaggle else {}
