"""Run one node: read its configuration, lock its folder, fork the supervisor, train, and exit with an outcome.

Signal handlers are installed first. Large modules are imported only after the node has its lock and its node.json and
has found a route to node 0, so that errors up to that point are reported at once. ddprun has no thread when it forks
the supervisor, which then forks the ranks (decision 0003).
"""

import argparse
import contextlib
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn

from ddprun.files import process_discovery, run_identity
from ddprun.files.node_dir import Journal, Node, NodeDir, claim_node_dir, write_early_outcome
from ddprun.files.runtime_dir import RuntimeDir
from ddprun.health.folder_watch import GIVE_UP_AFTER_S, WARN_AFTER_S, FolderWatch
from ddprun.metrics.recovery import Downtime
from ddprun.metrics.registration import deregister, push_outcome
from ddprun.nodes import joining, preflight
from ddprun.nodes.preflight import PreflightReport, StartedNode
from ddprun.output.console import Console
from ddprun.output.logs import TimedLog
from ddprun.output.progress import Progress
from ddprun.ranks import fork_server
from ddprun.ranks.rank_environment import allocate_resources, describe_allocation
from ddprun.ranks.termination import Signals, stopped_before_start
from ddprun.ranks.user_commands import UserCommands
from ddprun.ranks.workers import Workers
from ddprun.settings import launchers, node_config, options
from ddprun.settings.node_config import NodeConfig
from ddprun.system import machine, processes
from ddprun.system.errors import NodeError, node_error
from ddprun.system.file_writer import FileWriter
from ddprun.system.restart_policy import pod_exit_code
from ddpwire import locks, log_record, names
from ddpwire.exits import Exit
from ddpwire.machine import usable_cores
from ddpwire.run_files import (
    CHECKPOINTS,
    LOCK,
    NodeState,
    Outcome,
    node_name,
    rank_log,
    termination_message,
    timed_log,
)  # fmt: skip

DRAIN_S = 5.0  # without a reader, the rest of the output is given up
POLL_S = 0.05  # while the disk is asked for the newest checkpoint
CRASH_LOG = "ddprun-crash.log"
HARMLESS_THREADS = ("clock", "copies", "diagnosis", "history", "metrics", "notices", "output", "resolver", "summary")


@dataclass(frozen=True, kw_only=True)
class NodeExit(Node):
    """Ends this process with an outcome. Any thread may call it, and only the first call has an effect."""

    commands: UserCommands
    once: ClassVar[threading.Lock] = threading.Lock()

    def __call__(self, outcome: Outcome) -> NoReturn:
        """Write and log the outcome, and exit without finalizing the interpreter, which would take a second."""
        self.once.acquire()
        config, path, state = self.config, self.folder.path, self.journal.state
        has_met = state.state != "starting" or state.master is not None
        if self.folder.requeues:  # even for an outcome that the nodes did not agree on
            while not self.folder.requeues.is_ready():
                time.sleep(POLL_S)
            outcome = self.folder.requeues.limit(outcome)
        self.journal.update(state="failed" if outcome.code else "succeeded")
        self.commands.tell_end(outcome)
        code, cause, seconds = outcome.code, outcome.cause, time.time() - self.journal.state.started
        self.journal.emit("node_ended", code=code, cause=cause, message=outcome.message, seconds=seconds)
        try:
            self.files.call(outcome.write, path, timeout_s=GIVE_UP_AFTER_S)
        except OSError as error:
            self.console.log(f"the outcome cannot be written into {path}: {error.strerror or error}")
        self.commands.finish()
        deregister(config)
        user = run_identity.owner(config, os.environ)["user"]
        push_outcome(self, outcome, user)
        if config.retries_network:
            self._tell_kubernetes(outcome, seconds)
        if outcome.code:
            node, here, by_hand = config.node_rank, config.on_one_machine, config.by_hand
            if message := exit_message(outcome, node=node, folder=path, on_one_machine=here, by_hand=by_hand):
                self.console.log(message)
            if not has_met and not (config.spans_machines and machine.is_loopback(config.master_addr)):
                joining.report_refusal(outcome, str(node), config.master_addr, str(config.master_port), config.run_id)
        elif config.run_dir is None:
            shutil.rmtree(path.parent, ignore_errors=True)
        self.folder.runtime.remove()
        if not self.folder.has_locks:
            locks.disown(path / LOCK)
        self.console.drain(DRAIN_S)
        os._exit(pod_exit_code(outcome) if config.retries_network else outcome.code)

    def _tell_kubernetes(self, outcome: Outcome, seconds: float) -> None:
        """Write the record of the node into its log, and the outcome into the pod's status: nothing else remains."""
        for line in log_record.pack(self.folder.path, seconds):
            self.console.log(line)
        with contextlib.suppress(OSError):  # outside of a container, there is no such file
            Path("/dev/termination-log").write_text(termination_message(outcome))


def main() -> NoReturn:
    """Run one node and exit with the outcome's code."""
    signals = Signals(on_stop=lambda number: os._exit(128 + number), on_forward=lambda _: None)
    args, environ = options.parse(sys.argv[1:]), os.environ
    node_rank = environ.get(names.NODE_RANK) or environ.get("SLURM_NODEID")
    config: NodeConfig | None = None
    try:
        config = node_config.read_config(args, environ, count_ranks, now=time.time(), on_terminal=os.isatty(0))
        node_rank = str(config.node_rank)  # not a number yet if the node has none: then it has no folder
        node_config.check_program(config, alone=True)
        config = joining.settle_number(config, log_early, partial(preload_torch, config, log_early))
        node = config.node_rank
        node_rank, uid = str(node), run_identity.make_uid(config, environ)
        state = NodeState(
            run=config.run_id, run_uid=uid, node=node, pid=os.getpid(), state="starting", started=time.time()
        )
        if config.lifeline_fd is not None:
            signals.watch_lifeline(config.lifeline_fd)
        files = FileWriter(fork=True)
        prepare_folders(config, files)
        folder = claim_node_dir(config, state, files)
    except NodeError as error:
        end_early(error, args, node_rank, reports=config is None)
    log = TimedLog(folder.path / timed_log(None), node, files=files)
    console = Console(f"node{node}", log.add, files)
    journal = Journal(folder.path, replace(state, runtime=str(folder.runtime.path)), console, files)
    commands = UserCommands(config, environ, journal, files, signals)
    end = NodeExit(config=config, folder=folder, journal=journal, console=console, files=files, commands=commands)
    signals.on_stop = lambda number: end(stopped_before_start(number, node, signals.stop_reason))
    threading.excepthook = lambda args: end_on_thread_error(args, end)
    requeued_s = max(0.0, state.started - folder.previous_run.heard_at) if folder.previous_run else 0.0
    downtime = Downtime(began_at=time.monotonic(), requeued_s=requeued_s)
    journal.emit("node_started", host=socket.gethostname(), pid=state.pid, **downtime.requeued)

    report = PreflightReport(journal.log, quiet=config.on_one_machine)

    def take_place(config: NodeConfig) -> None:
        """From now on, be the node of this number."""
        nonlocal end, node
        end, node = replace(end, config=config), config.node_rank
        commands.config = config
        console.name = log.name = f"node{node}"
        journal.update(node=node, spare=config.spare)
        if not node:
            text = f"node 0 was lost: spare {config.machine} takes its place"
            commands.tell("lost_node", text, journal.state.attempt)

    def run() -> Outcome:
        resources = allocate_resources(config, environ)
        route: preflight.Route | None = None
        try:
            if not config.retries_network:
                route = preflight.find_route(config, report)
            preload_torch(config, console.log_now)
            lock_fd, forks = folder.lock_fd, config.forks
            workers = Workers(config.command, lock_fd=lock_fd, fork=forks, log=journal.log, spared=files.pid)
        finally:
            signals.listen()
            files.start()
            console.start()
        for line in filter(
            None, (*options.accepted(args, environ), describe_allocation(config, resources), *commands.problems())
        ):
            journal.log(line)
        if config.deadline is not None:
            stop = partial(signals.stop, "the run's deadline is near")
            node_config.watch_deadline(config.deadline, grace_s=config.grace_s, request_stop=stop, log=console.log)
        environ.pop(names.PROMETHEUS_MULTIPROC_DIR, None)  # prometheus_client would put our own series into files
        from ddprun.bringup import bring_up

        node = StartedNode(
            **vars(end),
            environ=dict(environ),
            signals=signals,
            workers=workers,
            resources=resources,
            report=report,
            route=route or preflight.find_route(config, report),
            downtime=downtime,
        )
        stop = partial(signals.stop, "the node's folder is gone")
        give_up = partial(end_without_disk, workers, console, folder.runtime)
        with FolderWatch(end, stop=stop, give_up=give_up):
            return bring_up(node, take_place)

    try:
        outcome = run()
    except Exception as error:
        outcome = outcome_of_error(error, folder)
    commands.tear_down(outcome.code)
    conclude(outcome, report, end)


def conclude(outcome: Outcome, report: PreflightReport, end: NodeExit) -> NoReturn:
    """Print the table of the preflight if that is all that was asked for, and end this process."""
    if outcome.code:
        report.failed(outcome.message)
    if end.config.check_only:
        end.console.put(1, report.table().encode())
    end(outcome)


def end_without_disk(workers: Workers, console: Console, runtime: RuntimeDir, error: NodeError) -> NoReturn:
    """End this process and its ranks because the run's folder cannot be written. No outcome is saved.

    A process that sleeps in the kernel ends only when the disk answers. It is named, and not waited for.
    """
    workers.on_exit, workers.on_supervisor_lost = lambda *_: None, lambda: None  # no rank has failed by itself
    workers.kill()
    workers.on_give_up(error)
    asleep = processes.asleep_in_kernel(os.getpid())
    sleeping = f"; these processes sleep in the kernel until the disk answers: {', '.join(asleep)}" if asleep else ""
    console.log(f"{error} (exit code {error.code}; no outcome is written{sleeping})")
    runtime.remove()
    console.drain(0.5)
    os._exit(error.code)


def end_early(error: NodeError, args: argparse.Namespace, node_rank: str | None, *, reports: bool) -> NoReturn:
    """End a node that has no folder yet. If ``reports`` is set, report its wrong settings to node 0."""
    log_early(str(error))
    write_early_outcome(error.outcome, args.run_dir or os.environ.get(names.RUN_DIR), node_rank)
    if reports:
        with contextlib.suppress(NodeError):
            settings = launchers.read_settings(args, os.environ)
            keys: tuple[launchers.Setting, ...] = ("node_rank", "master_addr", "master_port", "rdzv_id")
            joining.report_refusal(error.outcome, *(settings.get(key, ("", ""))[1] for key in keys))
    sys.exit(error.outcome.code)


def log_early(line: str) -> None:
    """Print a line before the node has a log."""
    print(f"ddprun: {line}", file=sys.stderr, flush=True)


def wait_for_disk(folder: Path, files: FileWriter, log: Callable[[str], None]) -> None:
    """Wait until the file system of the node's folder answers a write. If it does not, end this process.

    No outcome is written: the write would sleep in the kernel as well.
    """
    silent = f"the file system of {folder} has not answered for"
    files.begin(touch, folder)
    if files.has_ended(WARN_AFTER_S):
        return
    log(f"{silent} {WARN_AFTER_S:g} s; this node ends after {GIVE_UP_AFTER_S:g} s")
    if not files.has_ended(GIVE_UP_AFTER_S - WARN_AFTER_S):
        log(f"{silent} {GIVE_UP_AFTER_S:g} s (exit code {Exit.CANNOT_WRITE:d}; no outcome is written)")
        os._exit(Exit.CANNOT_WRITE)
    log(f"the file system of {folder} answers again")


def touch(folder: Path) -> None:
    """Create a folder, or change its time. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)


def prepare_folders(config: NodeConfig, files: FileWriter) -> None:
    """Create the folders of the node and of the checkpoints. In a pod, wait until the pod that it replaces has ended.

    That pod may still run on a machine that Kubernetes cannot reach, and hold the lock of the node's folder on a shared
    disk. Raises NodeError.
    """
    if not config.run_dir:
        return
    folder = config.run_dir / node_name(config.machine)
    wait_for_disk(folder, files, log_early)
    reason = f"another ddprun uses {folder}: the pod that this one replaces may still run"
    limit_s, pause_s = config.join_timeout_s, joining.FULL_POLL_S
    wait = joining.Wait(log=log_early, limit_s=limit_s, pause=lambda _: time.sleep(pause_s))
    while config.is_replaced and process_discovery.is_locked(folder):
        if wait.is_over((config.node_rank,), reason):
            raise node_error(Exit.ABSENT, "absent", reason, node=config.node_rank)
    with contextlib.suppress(OSError):  # a script that saves nothing needs no folder
        Path(config.checkpoint_dir or config.run_dir / CHECKPOINTS).mkdir(parents=True, exist_ok=True)


def preload_torch(config: NodeConfig, log: Callable[[str], None]) -> None:
    """Import torch if the ranks are to be forked. Must be called before this process has a thread."""
    if config.forks:
        with Progress(log, "importing torch"):
            fork_server.preload_torch(allocate_resources(config, os.environ).threads)


def count_ranks(kind: str) -> int:
    """Return the number of GPUs if ``kind`` is 'gpu', or of usable cores if it is 'cpu'."""
    return machine.count_gpus() if kind == "gpu" else usable_cores()


def outcome_of_error(error: BaseException, folder: NodeDir) -> Outcome:
    """Return the outcome of an error. If it is unexpected, write its traceback to a file."""
    if isinstance(error, NodeError):
        return error.outcome
    crash = folder.path / CRASH_LOG
    with contextlib.suppress(OSError):
        crash.write_text("".join(traceback.format_exception(error)))
    first_line = str(error).partition("\n")[0]
    message = f"a fault of ddprun: {type(error).__name__}: {first_line} (traceback in {crash})"
    return node_error(Exit.SOFTWARE, "internal", message).outcome


def end_on_thread_error(args: threading.ExceptHookArgs, end: NodeExit) -> None:
    """End the node when one of its threads fails, unless the training does not need that thread."""
    name = args.thread.name if args.thread else ""
    error = args.exc_value
    if error is None or args.exc_type is SystemExit:
        return
    if name in HARMLESS_THREADS:
        end.console.log(f"the thread {name} of ddprun ended: {args.exc_type.__name__}: {error}; the training continues")
        return
    end(outcome_of_error(error, end.folder))


def exit_message(outcome: Outcome, *, node: int, folder: Path, on_one_machine: bool, by_hand: bool = False) -> str:
    """Return the last line that ``node`` logs, or an empty string if another node on this machine logs the reason.

    If all nodes run ``on_one_machine``, their lines are read together, so only the node that failed logs the reason.
    Otherwise the other nodes log which node failed. Nodes that were started ``by_hand`` all log the reason, because
    each has its own terminal window. Pure.
    """
    reporter = outcome.node or 0  # the node whose log shows the reason
    if outcome.rank is None:
        reporter = 0 if outcome.cause == "node_lost" and outcome.node else node
    message, logs = outcome.message, f"the logs of node {node} are in {folder}"
    if reporter != node and outcome.node != node:
        if on_one_machine and not by_hand:
            return ""
        lost = f"stopped because node {outcome.node} was lost"
        reason = lost if outcome.rank is None else f"stopped because rank {outcome.rank} on node {reporter} failed"
        if outcome.node is None:
            reason = f"stopped; the log of node {reporter} shows why"
        message = message if by_hand or outcome.cause == "stopped" else reason
    # After a stop, no rank's log explains the end, whichever rank ended first.
    elif outcome.rank is not None and outcome.node == node and outcome.cause != "stopped":
        logs = f"the log of rank {outcome.rank} is {folder / rank_log(outcome.rank)}"
    return f"{message} (the run's exit code is {outcome.code}; {logs})"
