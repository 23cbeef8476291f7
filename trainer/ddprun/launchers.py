"""Who may say a node's place, and how: one function for each launcher, from its environment to our words.

Pure. A word keeps where it was said, so that the contract can refuse it by name. A launcher speaks where those before
it are silent: flags, PET_* (ddpctl, Kubeflow), Slurm, an Indexed Job, a rank's own variables, Kaggle.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Literal

from ddprun.errors import bad_contract, refused
from ddpwire import names
from ddpwire.exits import Exit

Word = Literal[
    "nnodes", "nproc", "node_rank", "master_addr", "master_port", "run_id", "max_restarts", "local_addr", "join_timeout"
]
Words = dict[Word, tuple[str, str]]  # word → (where it was said, what was said)

# torchrun's name of each word that can be said as it is: --node-rank, or PET_NODE_RANK.
TORCHRUN: dict[Word, str] = {
    "nnodes": "nnodes",
    "nproc": "nproc_per_node",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
    "run_id": "rdzv_id",
    "max_restarts": "max_restarts",
    "local_addr": "local_addr",
}
SLURM_PORTS = range(61000, 65536)  # above the kernel's ephemeral ports, so that no connection takes one in between
SLURM_NO_SRUN = 4_294_967_290  # from here on a step's number means the batch script, or salloc's shell


def words(options: argparse.Namespace, environ: Mapping[str, str]) -> Words:
    """All that was said. Raises NodeError."""
    said = from_pet(environ) | from_flags(options)
    for launcher in (from_slurm, from_elastic_pod, from_indexed_job, from_plain, from_kaggle):
        said = launcher(environ, said) | said
    return said


def join_timeout_s(environ: Mapping[str, str], *, on_one_machine: bool) -> float:
    """How long nodes may stay away: as long as whoever starts them may take. For ssh, nothing tells: a minute."""
    if on_one_machine:
        return 30.0
    if "KUBERNETES_SERVICE_HOST" in environ:
        return 600.0
    return 300.0 if "SLURM_JOB_ID" in environ else 60.0


def from_flags(options: argparse.Namespace) -> Words:
    """What the command line says."""
    return _from_torchrun(lambda name: (f"--{name.replace('_', '-')}", getattr(options, name)))


def from_pet(environ: Mapping[str, str]) -> Words:
    """What torchrun's own variables say, which ddpctl and Kubeflow's operators set."""
    return _from_torchrun(lambda name: (f"PET_{name.upper()}", environ.get(f"PET_{name.upper()}")))


def _from_torchrun(ask: Callable[[str], tuple[str, str | None]]) -> Words:
    words: Words = {}
    source, endpoint = ask("rdzv_endpoint")
    if endpoint:
        host, _, port = endpoint.rpartition(":")
        if not host:
            raise bad_contract(f"{source} is {endpoint!r}: HOST:PORT is what it takes")
        words |= {"master_addr": (source, host.strip("[]")), "master_port": (source, port)}
    for word, name in TORCHRUN.items():
        source, text = ask(name)
        if text:
            words[word] = (source, text)
    words = _from_rdzv_conf(*ask("rdzv_conf"), words) | words
    source, alone = ask("standalone")
    if alone and alone != "0":
        if words.get("nnodes", ("", "1"))[1] not in ("1", "1:1"):
            raise bad_contract(f"{source} is one node, but {' is '.join(words['nnodes'])}: give one of the two")
        place: Words = {"nnodes": (source, "1"), "node_rank": (source, "0")}
        words = place | {"master_addr": (source, "127.0.0.1"), "master_port": (source, "0")} | words
    return words


def _from_rdzv_conf(source: str, text: str | None, said: Words) -> Words:
    """``is_host=1,join_timeout=60``; what else torchrun's rendezvous can be told has no meaning here."""
    words: Words = {}
    for key, _, value in (pair.partition("=") for pair in (text or "").split(",") if pair):
        if key == "is_host" and value.lower() in ("1", "true", "yes"):
            if said.get("node_rank", ("", "0"))[1] != "0":
                raise bad_contract(
                    f"{source} says is_host, but {' is '.join(said['node_rank'])}: node 0 is the host, give one"
                )
            words["node_rank"] = (f"{source} is_host", "0")
        elif key in ("join_timeout", "timeout"):
            words["join_timeout"] = (f"{source} {key}", value)
    return words


def from_slurm(environ: Mapping[str, str], said: Words) -> Words:
    """A step of one task a node. With one task a GPU the first of each node stands for all; the others end at once."""
    nnodes = environ.get("SLURM_NNODES", "")
    if not nnodes or "SLURM_JOB_ID" not in environ or said.get("nnodes", ("", nnodes))[1] != nnodes:
        return {}
    if _slurm_number(environ, "SLURM_STEP_ID", SLURM_NO_SRUN) >= SLURM_NO_SRUN:
        if nnodes != "1" and "node_rank" not in said:
            raise bad_contract(
                f"a Slurm job of {nnodes} nodes, but srun did not start this ddprun: "
                f"srun --ntasks-per-node=1 ddprun ..., or --nnodes 1 for this node alone"
            )
        return _slurm_nproc(environ, 1)
    node = _slurm_number(environ, "SLURM_NODEID", 0)
    tasks = slurm_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1")
    num_tasks = tasks[node] if node < len(tasks) else 1
    words = _slurm_nproc(environ, num_tasks)
    if num_tasks > 1:
        if "SLURM_GPUS_PER_TASK" in environ:
            raise bad_contract(
                f"Slurm started {num_tasks} tasks on this node and SLURM_GPUS_PER_TASK hides their GPUs from each "
                f"other: srun --ntasks-per-node=1 --gpus-per-node={num_tasks} is what ddprun takes"
            )
        if environ.get("SLURM_LOCALID", "0") != "0":
            raise refused(
                Exit.OK,
                "ok",
                f"Slurm started {num_tasks} tasks on this node: the first of them brings up all ranks, this one ends",
            )
    words |= {"nnodes": ("SLURM_NNODES", nnodes), "node_rank": ("SLURM_NODEID", str(node))}
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nnodes != "1" and nodes:
        job = _slurm_number(environ, "SLURM_JOB_ID", 0)
        words["master_addr"] = ("SLURM_NODELIST", first_host(nodes))
        words["master_port"] = ("SLURM_JOB_ID", str(SLURM_PORTS[job % len(SLURM_PORTS)]))
    return words


def _slurm_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise bad_contract(f"{name} is {text!r}: a whole number from 0 is what Slurm sets")
    return int(text)


def _slurm_nproc(environ: Mapping[str, str], num_tasks: int) -> Words:
    if num_tasks > 1:
        return {"nproc": ("SLURM_TASKS_PER_NODE", str(num_tasks))}
    gpus = environ.get("SLURM_GPUS_ON_NODE")
    return {"nproc": ("SLURM_GPUS_ON_NODE", gpus)} if gpus and gpus != "0" else {}


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: ``gpu[07-09,12],x1`` is ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group() if first else "")


def slurm_tasks(text: str) -> tuple[int, ...]:
    """The tasks of each node: ``2(x3),1`` is 2, 2, 2, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(tasks) for tasks, times in pairs for _ in range(int(times or 1)))


def from_elastic_pod(environ: Mapping[str, str], said: Words) -> Words:
    """An elastic PyTorchJob gives its pods no rank, but names: JOB-worker-0 is the endpoint, JOB-worker-2 is node 2."""
    source, endpoint = said.get("master_addr", ("", ""))
    stem, _, zero = endpoint.partition(".")[0].rpartition("-")
    pod, _, index = environ.get("HOSTNAME", "").rpartition("-")
    if source != "PET_RDZV_ENDPOINT" or not stem or (pod, zero) != (stem, "0"):
        return {}
    return {"node_rank": ("the pod's number in HOSTNAME", index)}


def from_indexed_job(environ: Mapping[str, str], said: Words) -> Words:
    """The index of a pod is its node's rank, where the manifest has said of how many (else the pods are strangers)."""
    index = environ.get("JOB_COMPLETION_INDEX")
    return {"node_rank": ("JOB_COMPLETION_INDEX", index)} if index and "nnodes" in said else {}


def from_plain(environ: Mapping[str, str], said: Words) -> Words:
    """The variables of a rank, set by hand: a node of one rank, where nothing else says a place."""
    variables: dict[Word, str] = {
        "master_addr": names.MASTER_ADDR,
        "master_port": names.MASTER_PORT,
        "run_id": names.RUN_ID,
    }
    words: Words = {word: (name, environ[name]) for word, name in variables.items() if environ.get(name)}
    rank, world_size = environ.get(names.RANK), environ.get(names.WORLD_SIZE)
    someone_spoke = "nnodes" in said or "node_rank" in said or any(name.startswith("PET_") for name in environ)
    if someone_spoke or "TORCHELASTIC_RUN_ID" in environ or not (rank or world_size):
        return words  # inside of a rank they are its own, and not the place of a node that it starts
    if not rank or not world_size:
        given, missing = (names.RANK, names.WORLD_SIZE) if rank else (names.WORLD_SIZE, names.RANK)
        raise bad_contract(f"{given} is set, but {missing} is not: set both, or give --nnodes and --node-rank")
    if said.get("nproc", ("", "1"))[1] != "1":
        raise bad_contract(
            f"RANK and WORLD_SIZE make this a node of one rank, but {' is '.join(said['nproc'])}: "
            f"unset them, or give --nnodes and --node-rank"
        )
    if environ.get(names.LOCAL_RANK, "0") != "0":
        raise bad_contract(
            f"LOCAL_RANK is {environ[names.LOCAL_RANK]}: something has started one process a rank already; "
            f"ddprun is started once a node"
        )
    return words | {"nnodes": (names.WORLD_SIZE, world_size), "node_rank": (names.RANK, rank)}


def from_kaggle(environ: Mapping[str, str], said: Words) -> Words:
    """A notebook's machine: one node, a rank for each of its GPUs."""
    return {"nproc": ("Kaggle", "auto")} if "KAGGLE_KERNEL_RUN_TYPE" in environ and "nnodes" not in said else {}
