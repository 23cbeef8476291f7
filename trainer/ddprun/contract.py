"""A node's place in its job: what launchers say, checked, as one frozen value.

Pure. What contradicts is refused by name; nothing ever falls back to localhost.
"""

import argparse
import re
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddprun import affinity, launchers, machine
from ddprun import deadline as deadlines
from ddprun.deadline import Deadline
from ddprun.errors import bad_contract
from ddprun.launchers import Word, Words
from ddpwire import names

MAX_RESTARTS = 1000  # as good as no limit: progress is the limit (patience.py)
LONGEST_S = 100_000_000  # three years; a timer takes no more than threading.TIMEOUT_MAX
HANG_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What one node has to do, and with whom."""

    command: tuple[str, ...]  # a rank's argv
    forks: bool  # ranks are forked from a process that has imported torch
    min_nodes: int
    max_nodes: int
    nproc: int
    node_rank: int
    master_addr: str
    master_port: int  # 0: a free one, which only a single node can choose
    run_id: str
    run_dir: Path | None  # None: a temporary one
    checkpoint_dir: str | None
    max_restarts: int
    hang_timeout_s: float  # 0: a rank may be silent for ever
    grace_s: float
    deadline: Deadline | None  # None: nobody ends the run from outside
    join_timeout_s: float
    metrics_host: str | None  # None: where the master can reach it
    metrics_port: int  # 0: a free one
    targets_dir: Path | None  # where the node says where its metrics are; None: nowhere
    launcher: str
    pushgateway: str | None  # who is told how the run ended; None: nobody
    nodes_here: int  # nodes of the run that share this machine's cores
    lifeline_fd: int | None  # at its end of file this node stops
    local_addr: str | None  # this node's own; None: the one from which node 0 is reached
    patient: bool  # names and networks may come up later than this node does (Kubernetes)
    check_only: bool  # the preflight, and no ranks
    numa_binding: affinity.Mode | None  # None: as affinity.py decides

    @property
    def on_one_machine(self) -> bool:
        """Whether all nodes are simulated on this machine."""
        return machine.is_loopback(self.master_addr)


def read(
    options: argparse.Namespace, environ: Mapping[str, str], count: Callable[[str], int], *, now: float = 0.0
) -> Contract:
    """The contract. ``count`` tells how many ranks 'gpu' and 'cpu' are here, ``now`` the time. Raises NodeError."""
    words = launchers.words(options, environ)
    min_nodes, max_nodes = _nnodes(words)
    node_rank = _node_rank(words, max_nodes)
    master_addr, master_port = _master(words, max_nodes)
    here = machine.is_loopback(master_addr)
    grace_s = _seconds("--grace", options.grace, 30.0)
    default_s = launchers.join_timeout_s(environ, on_one_machine=here)
    timeout_from, timeout = words.get("join_timeout", ("", None))
    if options.join_timeout is not None:
        timeout_from, timeout = "--join-timeout", options.join_timeout
    run_dir = options.run_dir or environ.get("PET_LOG_DIR") or environ.get(names.RUN_DIR)
    return Contract(
        command=_command(options, environ),
        forks=sys.platform == "linux" and not (options.exec or options.no_python),  # macOS' libraries do not survive it
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        nproc=_nproc(words, environ, count),
        node_rank=node_rank,
        master_addr=master_addr,
        master_port=master_port,
        run_id=words.get("run_id", ("", "none"))[1],
        run_dir=Path(run_dir).absolute() if run_dir else None,
        checkpoint_dir=environ.get(names.CHECKPOINT_DIR) or None,
        max_restarts=_number(words, "max_restarts", MAX_RESTARTS),
        hang_timeout_s=_seconds("--hang-timeout", options.hang_timeout, HANG_TIMEOUT_S),
        grace_s=grace_s,
        deadline=deadlines.read(options.deadline, environ, grace_s=grace_s, now=now),
        join_timeout_s=_seconds(timeout_from, timeout, default_s),
        metrics_host=environ.get(names.METRICS_HOST) or None,
        metrics_port=_port(names.METRICS_PORT, environ.get(names.METRICS_PORT) or "0"),
        targets_dir=Path(environ[names.TARGETS_DIR]).absolute() if environ.get(names.TARGETS_DIR) else None,
        launcher=environ.get(names.LAUNCHER) or "ddprun",
        pushgateway=_url("--pushgateway", options.pushgateway)
        or _url(names.PUSHGATEWAY, environ.get(names.PUSHGATEWAY)),
        nodes_here=_nodes_here(environ.get(names.NODES_HERE) or "1"),
        lifeline_fd=_descriptor(environ.get(names.LIFELINE_FD)),
        local_addr=words.get("local_addr", ("", None))[1],
        patient="KUBERNETES_SERVICE_HOST" in environ,
        check_only=options.check_only,
        numa_binding=_numa_binding(options.numa_binding),
    )


def _nnodes(words: Words) -> tuple[int, int]:
    source, text = words.get("nnodes", ("", "1"))
    least, _, most = text.partition(":")
    if not re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text):
        raise bad_contract(f"{source} is {text!r}: a number of nodes, or MIN:MAX, is allowed, as 2 or 1:4")
    min_nodes, max_nodes = int(least), int(most or least)
    if not 1 <= min_nodes <= max_nodes:
        raise bad_contract(f"{source} is {text!r}: at least 1 node, and MIN not above MAX, is allowed")
    return min_nodes, max_nodes


def _node_rank(words: Words, max_nodes: int) -> int:
    if "node_rank" not in words and max_nodes > 1:
        raise bad_contract(
            f"{max_nodes} nodes, and which one this is was not said: "
            f"give --node-rank or {names.NODE_RANK}, 0 to {max_nodes - 1}"
        )
    rank = _number(words, "node_rank", 0)
    if rank >= max_nodes:
        raise bad_contract(
            f"{words['node_rank'][0]} is {rank}, but the job has {max_nodes} node{'s' * (max_nodes > 1)}: "
            f"{f'0 to {max_nodes - 1}' if max_nodes > 1 else 'only 0'} is allowed"
        )
    return rank


def _master(words: Words, max_nodes: int) -> tuple[str, int]:
    said_by = [words[word][0] for word in MASTER if word in words]
    if max_nodes == 1 and all(source in PLAIN for source in said_by):
        return "127.0.0.1", 0  # MASTER_* left over in a shell do not concern a node that is alone
    for word, flag, variable, what in (
        ("master_addr", "--master-addr", names.NODE_MASTER_ADDR, "the address of node 0"),
        ("master_port", "--master-port", names.NODE_MASTER_PORT, "a free port of node 0"),
    ):
        if word not in words and max_nodes > 1:
            raise bad_contract(
                f"{max_nodes} nodes, and {what} was not said: give {flag} or {variable}, the same on every node"
            )
    port = _port(*words.get("master_port", ("", "0")))
    if port == 0 and max_nodes > 1:
        raise bad_contract(f"{words['master_port'][0]} is 0, but {max_nodes} nodes must know the port: 1 to 65535")
    return words.get("master_addr", ("", "127.0.0.1"))[1], port


MASTER: tuple[Word, ...] = ("master_addr", "master_port")
PLAIN = (names.MASTER_ADDR, names.MASTER_PORT)


def _nproc(words: Words, environ: Mapping[str, str], count: Callable[[str], int]) -> int:
    source, text = words.get("nproc", ("", "1"))
    if text in ("auto", "gpu", "cpu"):
        if text == "auto":
            text = "gpu" if environ.get(names.DEVICE) != "cpu" and count("gpu") else "cpu"
        num_ranks = count(text)
        if not num_ranks:
            raise bad_contract(f"{source} is 'gpu', but this node has no GPU: a number, auto or cpu is allowed")
        return num_ranks
    num_ranks = _number(words, "nproc", 1)
    if not num_ranks:
        raise bad_contract(f"{source} is 0: at least 1 rank a node is allowed")
    return num_ranks


def _number(words: Words, word: Word, default: int) -> int:
    source, text = words.get(word, ("", str(default)))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        auto = ", auto, gpu or cpu" if word == "nproc" else ""
        raise bad_contract(f"{source} is {reprlib.repr(text)}: a whole number from 0{auto} is allowed")
    return int(text)


def _port(source: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) > 65535:
        raise bad_contract(f"{source} is {text!r}: a port from 1 to 65535, or 0 for a free one, is allowed")
    return int(text)


def _url(source: str, text: str | None) -> str | None:
    if text and not re.fullmatch(r"(https?://)?[^\s/:]+(:[0-9]+)?(/\S*)?", text):
        raise bad_contract(f"{source} is {text!r}: an address such as http://pushgateway:9091 is allowed")
    return text or None


def _nodes_here(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise bad_contract(f"{names.NODES_HERE} is {text!r}: a whole number from 1 is allowed")
    return int(text)


def _descriptor(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal():
        raise bad_contract(f"{names.LIFELINE_FD} is {text!r}: the number of an open descriptor is allowed")
    return int(text)


def _numa_binding(text: str | None) -> affinity.Mode | None:
    for mode in affinity.MODES:
        if text == mode:
            return mode
    if text is not None:
        raise bad_contract(f"--numa-binding is {text!r}: {', '.join(affinity.MODES)} is allowed")
    return None


def _seconds(flag: str, text: str | None, default: float) -> float:
    try:
        seconds = float(text) if text is not None else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= LONGEST_S:
        raise bad_contract(f"{flag} is {text!r}: a number of seconds from 0 to {LONGEST_S} is allowed")
    return seconds


def _command(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    arguments = options.script_args
    if options.no_python or environ.get("PET_NO_PYTHON") == "1":
        return (options.script, *arguments)
    is_module = options.module or environ.get("PET_MODULE") == "1"
    return (sys.executable, *(("-m",) if is_module else ()), options.script, *arguments)
