"""The configuration of a node: the checked settings from the flags and the launcher's variables.

Errors name the settings that contradict each other. With several nodes, node 0's address has no default.
"""

import argparse
import importlib.util
import math
import os
import re
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from ddprun.settings import launchers
from ddprun.settings.launchers import Setting, Settings
from ddprun.system import machine
from ddprun.system.errors import config_error, node_error
from ddpwire import kaggle, names
from ddpwire.exits import Exit
from ddpwire.machine import MAX_PORT
from ddpwire.run_files import NOTICE_EVENTS, open_regular

MARGIN_S = 5.0  # how long ddprun runs after its last rank has ended
SLURM_MARGIN_S = 30.0  # the batch script may have to requeue the job after ddprun
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LAUNCHERS = (names.LAUNCHER, names.RUN_UID, "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
DEFAULT_RUN_ID = "none"  # torchrun's id of each run that was given no id
MAX_WHOLE = 999_999_999
MAX_RESTARTS = 1000  # in effect no limit: restart_policy.py ends a run without progress
MAX_SECONDS = 100_000_000  # three years; a timer takes no more than threading.TIMEOUT_MAX
STOP_SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "USR2": signal.SIGUSR2}
UNNUMBERED = -1  # the node_rank of a node until joining.py assigns one
RUN_PATH = ("-m", "ddprun.run_path")


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """The time at which the launcher ends the run.

    Slurm kills a run at its time limit, Kubernetes at activeDeadlineSeconds, and Kaggle after 12 hours. None of them
    warns the ranks, so ddprun stops the ranks earlier, with SIGTERM and a grace period.
    """

    source: str  # the flag, variable or launcher that sets it
    at: float  # in seconds since the epoch
    margin_s: float = MARGIN_S


def read_deadline(
    flag: str | None, environ: Mapping[str, str], *, grace_s: float, now: float, teardown_s: float = 0.0
) -> Deadline | None:
    """Return the deadline of this node, or None. ``now`` is in seconds since the epoch. Raises NodeError."""
    for source, text in (("--deadline", flag), (names.DEADLINE, environ.get(names.DEADLINE))):
        if text:
            return _parse_deadline(source, text, grace_s, MARGIN_S + teardown_s, now)
    source, end = "SLURM_JOB_END_TIME", environ.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal():
        return Deadline(source=source, at=float(end), margin_s=SLURM_MARGIN_S + teardown_s)
    ends = kaggle.ends_at(environ, started=kaggle.container_start()) if kaggle.session(environ) else None
    return None if ends is None else Deadline(source="the Kaggle session's end", at=ends, margin_s=kaggle.MARGIN_S)


def _parse_deadline(source: str, text: str, grace_s: float, margin_s: float, now: float) -> Deadline:
    from_now = ""
    try:
        left_s = float(text)
    except ValueError:
        from_now = " s from now"
        try:
            left_s = datetime.fromisoformat(text).timestamp() - now
        except (ValueError, OverflowError):
            left_s = math.nan
    if from_now and left_s <= 0:
        raise config_error(f"{source} is {text!r}, which is in the past", hint="give a later time")
    if not 0 <= left_s < math.inf:
        hint = "expected seconds from the start, or a time such as 2030-01-31T08:00:00+00:00"
        raise config_error(f"{source} is {text!r}", hint=hint)
    if left_s <= grace_s + margin_s:
        raise config_error(
            f"{source} is {text}, which is too soon (the ranks get {grace_s:g} s to save, and ddprun needs another "
            f"{margin_s:g} s)",
            hint=f"give {'a time ' * bool(from_now)}more than {grace_s + margin_s:g}{from_now}, or a shorter --grace",
        )
    return Deadline(source=source, at=now + left_s, margin_s=margin_s)


def watch_deadline(
    deadline: Deadline, *, grace_s: float, request_stop: Callable[[], None], log: Callable[[str], None]
) -> None:
    """Start a timer that calls ``request_stop`` when only the grace period and the margin remain."""

    def expire() -> None:
        left_s = max(0, math.ceil(deadline.at - time.time()))
        log(f"the deadline ({deadline.source}) is in {left_s} s: the ranks are asked to save and stop")
        request_stop()

    wait_s = deadline.at - time.time() - grace_s - deadline.margin_s
    timer = threading.Timer(min(max(0.0, wait_s), threading.TIMEOUT_MAX), expire)
    timer.daemon = True
    timer.start()


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """The settings of one node: what it runs, and with which other nodes."""

    command: tuple[str, ...]  # a rank's argv
    forks: bool  # ranks are forked from a process that has imported torch
    min_nodes: int
    max_nodes: int
    spares: int  # further machines, which wait to take the place of a lost node
    local_world_size: int
    node_rank: int  # UNNUMBERED if no launcher sets it
    may_host: bool  # whether a node that is not numbered may become node 0
    master_addr: str
    master_port: int  # 0 means a free port, which only a single node can choose
    run_id: str
    secret: bytes = field(repr=False)  # signs the nodes' values in the run's store; empty: they are not signed
    run_dir: Path | None  # None means a temporary folder
    checkpoint_dir: str | None
    resumes: str  # the run whose checkpoints should be in checkpoint_dir; empty: none
    checkpoint_copies: int  # the number of nodes that keep the checkpoints, including node 0
    max_restarts: int
    restarts_errors: bool  # whether ranks also start again after an error of the script
    hang_timeout_s: float  # 0 means no limit
    grace_s: float
    stop_signal: int  # asks the ranks to save and end
    node_setup: tuple[str, ...]  # shell commands, see ranks/user_commands.py
    node_teardown: tuple[str, ...]
    notify: tuple[str, ...]
    notify_on: tuple[str, ...]
    setup_timeout_s: float  # for all commands together
    teardown_timeout_s: float  # 0 without commands
    deadline: Deadline | None  # None if the launcher does not end the run
    join_timeout_s: float
    metrics_host: str | None  # None means the address from which node 0 is reached
    metrics_port: int  # 0 means a free port
    targets_dir: Path | None  # the folder for the target file of this node's metrics, if any
    launcher: str
    by_hand: bool  # no launcher is known, so each node may have its own terminal window
    pushgateway: str | None  # the Pushgateway that gets the outcome, if any
    spans_machines: bool  # a loopback address of node 0 is a mistake
    nodes_here: int  # nodes of the run that share this machine's cores
    lifeline_fd: int | None  # this node stops when this descriptor reaches its end of file
    local_addr: str | None  # None means the address from which node 0 is reached
    slurm_job: str | None  # the id of the Slurm job, or None outside Slurm
    slurm_step: str  # the id of its step; empty outside srun
    num_requeues: int  # how often Slurm has requeued this job
    retries_network: bool  # names and networks may become available later (Kubernetes)
    is_replaced: bool  # a controller replaces a node that ends, and the other nodes wait for its replacement
    one_port: bool  # the ranks meet in node 0's own store, so only the master port must be open
    check_only: bool  # only the preflight, no ranks
    numa_binding: machine.BindingMode | None  # None means the default of machine.plan_affinity
    shown_local_ranks: frozenset[int] | None  # the ranks whose output the console shows; None means all
    no_prefix: bool  # lines of ranks on the console do not begin with their node and rank
    debug_rank: int | None  # the global rank to debug, if any
    role: str  # torch elastic's role of the ranks of this node
    virtual_local_rank: bool  # each rank has LOCAL_RANK=0 and sees its own GPU alone
    spare: int | None = None  # the number of this machine while it was a spare; None: it was none

    def reads_stdin(self, rank: int) -> bool:
        """Return whether a rank reads ddprun's stdin.

        At most one rank does, because several ranks would have to share the input.
        """
        return self.max_nodes * self.local_world_size == 1 or rank == self.debug_rank

    def shows_raw(self, rank: int) -> bool:
        """Return whether the console shows a rank's bytes immediately.

        This is so if the rank is being debugged, or is the only rank that is shown.
        """
        shown = range(self.local_world_size) if self.shown_local_ranks is None else self.shown_local_ranks
        return rank == self.debug_rank or (self.max_nodes == 1 and [*shown] == [rank])

    def prefix(self, rank: int) -> str:
        """Return the prefix of a rank's lines on the console."""
        return "" if self.no_prefix or self.shows_raw(rank) else f"[node{self.node_rank} rank{rank}] "

    @property
    def machine(self) -> int:
        """Return the number of this machine, which it keeps when it takes the place of a node."""
        return self.node_rank if self.spare is None else self.spare

    @property
    def is_spare(self) -> bool:
        """Return whether this machine waits to take the place of a lost node."""
        return self.node_rank >= self.max_nodes

    @property
    def replaces_node_0(self) -> bool:
        """Return whether the run goes on with a new node 0 after the loss of node 0."""
        return self.is_replaced or self.spares > 0

    @property
    def on_one_machine(self) -> bool:
        """Return whether all nodes are simulated on this machine."""
        return machine.is_loopback(self.master_addr) and not self.spans_machines


def read_config(
    options: argparse.Namespace,
    environ: Mapping[str, str],
    count: Callable[[str], int],
    *,
    now: float = 0.0,
    on_terminal: bool = False,
) -> NodeConfig:
    """Return the configuration. Raises NodeError.

    ``count`` returns the number of ranks for 'gpu' and 'cpu'. ``now`` is in seconds since the epoch. ``on_terminal``
    says whether stdin is a terminal, where a single rank may wait for a user's input.
    """
    settings = launchers.read_settings(options, environ)
    spares = _whole("--spares", options.spares or "0", "a whole number of at least 0")
    min_nodes, max_nodes = _nnodes(settings, spares)
    if options.check_only:  # spares are checked like nodes
        min_nodes, max_nodes, spares = min_nodes + spares, max_nodes + spares, 0
    node_rank = _node_rank(settings, max_nodes, spares)
    master_addr, master_port = _master(settings, max_nodes)
    grace_s = _grace_s(options.grace, environ)
    teardown_s = _seconds("--teardown-timeout", options.teardown_timeout, 60.0)
    teardown_s = teardown_s if options.node_teardown else 0.0
    spans_machines = launchers.spans_machines(environ, max_nodes, master_addr)
    here = machine.is_loopback(master_addr) and not spans_machines
    default_s = launchers.join_timeout_s(environ, on_one_machine=here)
    timeout_from, timeout = settings.get("join_timeout", ("", None))
    if options.join_timeout is not None:
        timeout_from, timeout = "--join-timeout", options.join_timeout
    local_world_size = _local_world_size(settings, environ, count)
    debug_rank, last_rank = None, local_world_size - 1
    if options.debug_rank is not None:  # how many ranks other nodes have is known when they meet (agent.py)
        known = f" ({f'0 to {last_rank}' if last_rank else 'only 0'})" if max_nodes == 1 else ""
        most = last_rank if max_nodes == 1 else MAX_WHOLE
        debug_rank = _whole("--debug-rank", options.debug_rank, f"a rank of this run{known}", most=most)
    is_debugged = debug_rank is not None or (on_terminal and max_nodes == local_world_size == 1)
    run_dir = options.run_dir or environ.get("PET_LOG_DIR") or environ.get(names.RUN_DIR)
    targets_dir, lifeline = environ.get(names.TARGETS_DIR), environ.get(names.LIFELINE_FD)
    nodes_here = environ.get(names.NODES_HERE) or "1"
    restart_settings = settings
    if options.max_restarts is None and options.restart_limit is not None:
        restart_settings = {"max_restarts": ("--restart-limit", options.restart_limit)}
    command = _command(options, settings)
    return NodeConfig(
        command=command,
        # Only scripts of Python are forked, and none on macOS, whose libraries fail after a fork.
        forks=sys.platform == "linux" and _names_script(command) and not options.exec,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        spares=spares,
        local_world_size=local_world_size,
        node_rank=node_rank,
        may_host="is_host" not in settings,
        master_addr=master_addr,
        master_port=master_port,
        run_id=settings.get("rdzv_id", ("", DEFAULT_RUN_ID))[1],
        secret=read_secret(environ),
        run_dir=Path(run_dir).absolute() if run_dir else None,
        checkpoint_dir=environ.get(names.CHECKPOINT_DIR) or None,
        resumes=options.resumes or "",
        checkpoint_copies=_whole("--checkpoint-copies", options.checkpoint_copies or "1", "at least 1", least=1),
        max_restarts=_number(restart_settings, "max_restarts", MAX_RESTARTS),
        restarts_errors=options.max_restarts is not None,
        hang_timeout_s=_seconds("--hang-timeout", options.hang_timeout, 0.0 if is_debugged else 300.0),
        grace_s=grace_s,
        stop_signal=STOP_SIGNALS[_choice("--stop-signal", options.stop_signal, STOP_SIGNALS) or "TERM"],
        node_setup=tuple(options.node_setup or ()),
        node_teardown=tuple(options.node_teardown or ()),
        notify=_notify(options.notify or ()),
        notify_on=_events(options.notify_on),
        setup_timeout_s=_seconds("--setup-timeout", options.setup_timeout, 1800.0),
        teardown_timeout_s=teardown_s,
        deadline=read_deadline(options.deadline, environ, grace_s=grace_s, teardown_s=teardown_s, now=now),
        join_timeout_s=_seconds(timeout_from, timeout, default_s),
        metrics_host=environ.get(names.METRICS_HOST) or None,
        metrics_port=_port(names.METRICS_PORT, environ.get(names.METRICS_PORT) or "0"),
        targets_dir=Path(targets_dir).absolute() if targets_dir else None,
        launcher=environ.get(names.LAUNCHER) or "ddprun",
        by_hand=not any(name in environ for name in LAUNCHERS),
        pushgateway=_url("--pushgateway", options.pushgateway)
        or _url(names.PUSHGATEWAY, environ.get(names.PUSHGATEWAY)),
        spans_machines=spans_machines,
        nodes_here=_whole(names.NODES_HERE, nodes_here, "a whole number of at least 1", least=1),
        lifeline_fd=_whole(names.LIFELINE_FD, lifeline, "the number of an open descriptor") if lifeline else None,
        local_addr=settings.get("local_addr", ("", None))[1],
        slurm_job=environ.get("SLURM_JOB_ID") or None,
        slurm_step=environ.get("SLURM_STEP_ID", ""),
        num_requeues=launchers.slurm_number(environ, "SLURM_RESTART_COUNT", 0),
        retries_network="KUBERNETES_SERVICE_HOST" in environ,
        is_replaced=environ.get(names.NODE_REPLACED) == "1" and max_nodes > 1 and node_rank != UNNUMBERED,
        one_port=environ.get(names.ONE_PORT) == "1" and max_nodes > 1,
        check_only=options.check_only,
        numa_binding=_choice("--numa-binding", options.numa_binding, machine.BINDING_MODES),
        shown_local_ranks=_shown_local_ranks(settings, local_world_size),
        no_prefix=options.no_prefix,
        debug_rank=debug_rank,
        role=settings.get("role", ("", "default"))[1],
        virtual_local_rank=_virtual_local_rank(settings, environ, local_world_size),
    )


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the run's secret, or empty bytes if the node has none. Raises NodeError."""
    if not (path := environ.get(names.SECRET_FILE)):
        return b""
    source, folder = f"{names.SECRET_FILE} is {path}", Path(path).parent
    if "KUBERNETES_SERVICE_HOST" in environ and folder.is_dir() and not any(folder.glob("[!.]*")):
        return b""  # an optional Secret that does not exist: the kubelet mounts a folder without files
    try:
        with open_regular(Path(path)) as file:
            info, secret = os.fstat(file.fileno()), file.read(4096).strip()
    except OSError as error:
        raise config_error(f"{source}: {error.strerror}") from None
    others = 0o077 if info.st_uid == os.geteuid() else 0o022  # the files of a Kubernetes Secret belong to root
    if info.st_uid not in (0, os.geteuid()) or info.st_mode & others:
        raise config_error(f"{source}, which other users can access", hint="make it a file of your own with mode 600")
    if len(secret) < 16:
        raise config_error(f"{source}, which has fewer than 16 bytes")
    return secret


def check_program(config: NodeConfig, *, alone: bool = False) -> None:
    """Check that the script exists or, for a module, that its top-level package exists. Raises NodeError (66).

    ``alone`` states that the nodes have not met yet. If it is set, a run of several nodes is not checked. Otherwise
    this node could end before the nodes have met, and the other nodes would wait for it. Programs other than Python are
    not checked.
    """
    command = config.command
    if not _names_script(command) or config.check_only or (alone and config.max_nodes > 1):
        return
    if command[1:3] == RUN_PATH or command[1] != "-m":
        script = command[3 if command[1] == "-m" else 1]
        if not Path(script).exists():
            raise node_error(Exit.NO_INPUT, "config", f"{script}: no such script in {Path.cwd()}")
        return
    name = command[2].partition(".")[0]
    try:
        spec = name and (importlib.util.find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())]))
    except ValueError:  # the module is loaded, but does not record where from
        return
    if spec is None:
        message = f"-m {command[2]}: no module {name} is installed or in {Path.cwd()}"
        raise node_error(Exit.NO_INPUT, "config", message)


def _nnodes(settings: Settings, spares: int) -> tuple[int, int]:
    source, text = settings.get("nnodes", ("", "1"))
    try:
        least, most = names.node_range(text)
    except ValueError as error:
        raise config_error(f"{source} is {text!r}: {error}") from None
    if source == "SLURM_NNODES":  # the allocation includes the spares
        least = most = most - spares
    if spares and (least < most or spares >= most):
        nodes = f"{least}:{most} nodes" if least < most else f"{most} nodes"
        hint = "the number of nodes must be fixed, and larger than the number of spares"
        raise config_error(f"--spares is {spares} for {nodes}", hint=hint)
    return least, most


def _node_rank(settings: Settings, max_nodes: int, spares: int) -> int:
    if "node_rank" not in settings and max_nodes > 1:
        if settings.get("rdzv_backend", ("", ""))[1] == launchers.C10D and not spares:
            return UNNUMBERED
        hint = f"give --node-rank or {names.NODE_RANK} (0 to {max_nodes - 1}), or --rdzv-backend=c10d on all nodes"
        raise config_error(f"the job has {max_nodes} nodes, but the rank of this node is not set", hint=hint)
    rank = _number(settings, "node_rank", 0)
    if rank >= max_nodes + spares:
        nodes = f"{max_nodes} nodes" if max_nodes > 1 else "only 1 node"
        hint = f"expected 0 to {max_nodes + spares - 1}" if max_nodes > 1 else "expected 0"
        source = settings["node_rank"][0]
        raise config_error(f"the rank of this node is {rank} (from {source}), but the job has {nodes}", hint=hint)
    return rank


def _master(settings: Settings, max_nodes: int) -> tuple[str, int]:
    sources = [source for setting, (source, _) in settings.items() if setting in ("master_addr", "master_port")]
    if max_nodes == 1 and {*sources} <= {names.MASTER_ADDR, names.MASTER_PORT}:
        return "127.0.0.1", 0  # MASTER_* variables left over in a shell do not matter to a single node
    for setting, flag, variable, description in (
        ("master_addr", "--master-addr", names.NODE_MASTER_ADDR, "the address of node 0"),
        ("master_port", "--master-port", names.NODE_MASTER_PORT, "the port of node 0"),
    ):
        if setting not in settings and max_nodes > 1:
            hint = f"give {flag} or {variable}, the same on every node"
            raise config_error(f"the job has {max_nodes} nodes, but {description} is not set", hint=hint)
    port = _port(*settings.get("master_port", ("", "0")))
    if port == 0 and max_nodes > 1:
        source = settings["master_port"][0]
        raise config_error(f"{source} is 0, but the {max_nodes} nodes must know the port: expected 1 to {MAX_PORT}")
    return settings.get("master_addr", ("", "127.0.0.1"))[1], port


def _local_world_size(settings: Settings, environ: Mapping[str, str], count: Callable[[str], int]) -> int:
    source, text = settings.get("nproc_per_node", ("", "1"))
    if text == "auto":
        text = "gpu" if environ.get(names.DEVICE) != "cpu" and count("gpu") else "cpu"
    num_ranks = count(text) if text in ("gpu", "cpu") else _number(settings, "nproc_per_node", 1)
    if not num_ranks and text == "gpu":
        raise config_error(f"{source} is 'gpu', but this node has no GPU: expected a number, auto or cpu")
    if not num_ranks:
        raise config_error(f"{source} is 0: expected at least 1 rank per node")
    return num_ranks


def _shown_local_ranks(settings: Settings, local_world_size: int) -> frozenset[int] | None:
    """Return the local ranks whose output the console shows, or None for all of them."""
    redirected = _streams(*settings.get("redirects", ("", "")), local_world_size)
    copied = _streams(*settings.get("tee", ("", "")), local_world_size)
    hidden = {rank for rank in redirected if redirected[rank] == "3" and copied.get(rank, "0") == "0"}
    shown = _local_ranks(*settings.get("local_ranks_filter", ("", "")), local_world_size)
    return frozenset(range(local_world_size) if shown is None else shown) - hidden if hidden else shown


def _streams(source: str, text: str, local_world_size: int) -> dict[int, str]:
    """Parse the value of a torchrun flag, such as ``3`` or ``0:3,1:0``.

    Return the streams of each local rank (1: stdout, 2: stderr, 3: both, 0: none).
    """
    if text and not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):  # torch's format
        hint = "expected a number from 0 to 3, or one per local rank such as 0:3,1:0"
        raise config_error(f"{source} is {reprlib.repr(text)}", hint=hint)
    if ":" not in text:
        return dict.fromkeys(range(local_world_size), text or "0")
    return {int(rank): streams for rank, streams in (pair.split(":") for pair in text.split(","))}


def _virtual_local_rank(settings: Settings, environ: Mapping[str, str], local_world_size: int) -> bool:
    given = _is_on(settings, "virtual_local_rank")
    visible = environ.get(CUDA_VISIBLE_DEVICES)
    if given and visible and (number := len(visible.split(","))) < local_world_size:
        message = f"--virtual-local-rank gives each of {local_world_size} ranks a GPU of its own"
        reason = f"{CUDA_VISIBLE_DEVICES}={visible} names only {number} GPU{'s' * (number > 1)}"
        raise config_error(f"{message}, but {reason}", hint="start fewer ranks, or name more GPUs")
    return given


def _is_on(settings: Settings, switch: Setting) -> bool:
    return settings.get(switch, ("", ""))[1] == "1"


def _local_ranks(source: str, text: str, local_world_size: int) -> frozenset[int] | None:
    if not text:
        return None
    ranks = frozenset(int(word) if re.fullmatch(r"[0-9]{1,9}", word) else -1 for word in text.split(","))
    if min(ranks) < 0 or max(ranks) >= local_world_size:
        hint = "expected 0, the only local rank"
        if local_world_size > 1:
            hint = f"expected local ranks from 0 to {local_world_size - 1}, separated by commas"
        raise config_error(f"{source} is {reprlib.repr(text)}", hint=hint)
    return ranks


def _number(settings: Settings, setting: Setting, default: int) -> int:
    source, text = settings.get(setting, ("", str(default)))
    is_ranks = setting == "nproc_per_node"
    allowed = "auto, gpu, cpu or a whole number of at least 1" if is_ranks else "a whole number of at least 0"
    return _whole(source, text, allowed)


def _whole(source: str, text: str, allowed: str, *, least: int = 0, most: int = MAX_WHOLE) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise config_error(f"{source} is {reprlib.repr(text)}: expected {allowed}")
    return int(text)


def _port(source: str, text: str) -> int:
    return _whole(source, text, f"a port from 1 to {MAX_PORT}, or 0 for a free one", most=MAX_PORT)


def _url(source: str, text: str | None) -> str | None:
    if text and not re.fullmatch(r"(https?://)?[^\s/:]+(:[0-9]+)?(/\S*)?", text):
        raise config_error(f"{source} is {text!r}: expected an address such as http://pushgateway:9091")
    return text or None


def _choice(flag: str, text: str | None, allowed: Collection[str]) -> Any:
    if text is not None and text not in allowed:
        raise config_error(f"{flag} is {text!r}: expected {', '.join(allowed)}")
    return text


def _notify(targets: Collection[str]) -> tuple[str, ...]:
    if any(re.fullmatch(names.ADDRESS_PATTERN, target) for target in targets):
        hint = "put it in a variable, and give --notify '$NAME'"
        raise config_error("--notify is an address, which may be secret", hint=hint)
    return tuple(targets)


def _events(text: str | None) -> tuple[str, ...]:
    events = NOTICE_EVENTS if text is None else tuple(text.split(","))
    for event in events:
        _choice("--notify-on", event, NOTICE_EVENTS)
    return events


def _grace_s(flag: str | None, environ: Mapping[str, str]) -> float:
    for name in ("PET_SHUTDOWN_TIMEOUT", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):  # torchrun's
        if flag is None and environ.get(name):
            return _seconds(name, environ[name], 0.0)
    return _seconds("--grace", flag, 30.0)


def _seconds(flag: str, text: str | None, default: float) -> float:
    try:
        seconds = float(text) if text is not None else default
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:
        raise config_error(f"{flag} is {text!r}: expected a number of seconds from 0 to {MAX_SECONDS}")
    return seconds


def _names_script(command: Sequence[str]) -> bool:
    """Return False for another program, and for a Python that ``--no-python`` gives its own options or no script."""
    program, *arguments = command
    names_module = arguments[:1] == ["-m"] and len(arguments) > 1
    return program == sys.executable and (names_module or (bool(arguments) and not arguments[0].startswith("-")))


def _command(options: argparse.Namespace, settings: Settings) -> tuple[str, ...]:
    program = (options.script, *options.script_args)
    if _is_on(settings, "run_path"):
        return (sys.executable, *RUN_PATH, *program)
    if _is_on(settings, "no_python"):
        return program
    return (sys.executable, *(("-m",) if _is_on(settings, "module") else ()), *program)
