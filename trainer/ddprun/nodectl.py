"""``python -m ddprun.nodectl``: query and control the ddprun processes of this machine.

Launchers start this program often, so it imports little besides the standard library and ddpwire. It prints JSON lines;
only ``logs`` prints the logs of a run.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ddprun.files import process_discovery
from ddprun.output.log_view import strip_torch_prefix
from ddprun.system import network, processes
from ddpwire.exits import Exit
from ddpwire.history import HISTORY
from ddpwire.machine import MAX_PORT, MIG, devices_of_rank
from ddpwire.merged_output import LogTail, MergedOutput
from ddpwire.run_files import (
    KILLED_ON_REQUEST,
    NODE,
    NODE_LOG,
    OUTCOME,
    open_regular,
    parse_json,
    rank_log,
    read_end,
    read_record,
)  # fmt: skip

HISTORY_BYTES = 4096  # how much of the last rows is read
DEAD_AFTER_S = 2.0  # a node that has no process and no outcome for this long was killed
POLL_S = 0.02  # a person or a launcher waits for the answer
LIST_GPUS_S = 25.0  # nvidia-smi takes seconds if it has to load the driver, and hangs with a broken one
NO_GPU = (127, 6)  # nvidia-smi cannot start, or finds no device (see its manual page)
SIGNALS = {name: signal.Signals[f"SIG{name}"] for name in ("TERM", "INT", "KILL", "USR1", "USR2")}


def mark(node: int, rank: int, line: bytes) -> bytes:
    """Prefix a line of a rank's log with its node and rank."""
    return f"[node{node} rank{rank}] ".encode() + strip_torch_prefix(line, rank)


def node_dirs(run_dir: Path, nodes: list[int]) -> list[tuple[int, Path]]:
    """Return the existing folders of ``nodes`` with their numbers, in order. If ``nodes`` is empty, return all."""
    paths = ((path.name.removeprefix("node-"), path) for path in run_dir.glob("node-*"))
    return sorted((int(node), path) for node, path in paths if node.isdecimal() and (not nodes or int(node) in nodes))


def find_logs(
    folders: list[tuple[int, Path]], ranks: list[int], files: list[str]
) -> Iterator[tuple[Path, Callable[[bytes], bytes] | None]]:
    """Yield the logs to print, each with a function that prefixes its lines, or None."""
    for node, folder in folders:
        for name in files or (() if ranks else (NODE_LOG,)):
            yield folder / name, None
        for rank in () if files else sorted({*ranks}):
            yield folder / rank_log(rank), functools.partial(mark, node, rank)


def print_logs(args: argparse.Namespace) -> bool:
    """Print the logs. With --follow, continue until every node has ended. Return whether there are logs."""
    tails: dict[Path, LogTail] = {}
    output = MergedOutput(sys.stdout.buffer.write)
    parent, started = os.getppid(), time.monotonic()
    alive_at = started  # when a node's lock was last held

    def all_ended() -> bool:
        nonlocal alive_at
        folders = [folder for _, folder in node_dirs(args.run_dir, args.nodes)]
        if any(map(process_discovery.is_alive, folders)):
            alive_at = time.monotonic()
            return False
        return all((f / OUTCOME).exists() for f in folders) or time.monotonic() - alive_at > DEAD_AFTER_S

    while True:
        # If the parent has ended, no process reads the output any more.
        has_lost_reader = os.getppid() != parent
        is_over = all_ended() if tails else time.monotonic() - started > 10.0  # the first file may appear late
        last = not args.follow or has_lost_reader or is_over
        for path, prefix in find_logs(node_dirs(args.run_dir, args.nodes), args.ranks, args.files):
            if path not in tails and path.is_file():
                tails[path] = LogTail(path, output.add_source(prefix), args.tail)
        for log in tails.values():
            log.pass_on()
            if last:
                log.close()
        sys.stdout.buffer.flush()
        if last:
            return bool(tails)
        time.sleep(0.1)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(prog="nodectl", description="Query and control the ddpruns of this machine.")
    verbs = top.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="print the state of each folder as a JSON line")
    show.add_argument("node_dirs", metavar="NODE_DIR", nargs="+", type=Path)
    send = verbs.add_parser("signal", help="signal the ddprun of each folder")
    send.add_argument("--signal", choices=SIGNALS, default="TERM", dest="name")
    send.add_argument("--find", type=float, default=0.3, metavar="S", help="search for up to S seconds")
    send.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait up to S seconds until they have ended")
    send.add_argument("node_dirs", metavar="NODE_DIR", nargs="+", type=Path)
    port = verbs.add_parser("port", help="print a free port as JSON")
    port.add_argument("--want", type=int, default=0, metavar="P", help="only this port; 0: any free port")
    port.add_argument("--host", default="127.0.0.1")
    verbs.add_parser("gpus", help="print the GPUs that CUDA_VISIBLE_DEVICES allows, one per line; unset: all GPUs")
    logs = verbs.add_parser("logs", help="print the nodes' logs")
    logs.add_argument("-f", "--follow", action="store_true", help="continue until every node has ended")
    logs.add_argument("--rank", type=int, action="append", default=[], dest="ranks", metavar="R")
    logs.add_argument("--node", type=int, action="append", default=[], dest="nodes", metavar="N")
    logs.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines of each file")
    logs.add_argument(
        "--file", action="append", default=[], dest="files", metavar="NAME", help="print this file of each node instead"
    )
    logs.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    return top


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it cannot be read."""
    try:
        return parse_json(read_record(path))
    except (OSError, ValueError, RecursionError):
        return None


def last_rows(path: Path) -> str:
    """Return the header and the last rows of a history file, or an empty string if it cannot be read."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        header, text = file.readline().decode(errors="replace"), read_end(path, HISTORY_BYTES)
        return text if text.startswith(header) else header + text.partition("\n")[2]
    return ""


def show(args: argparse.Namespace) -> int:
    """Print the state of each folder as a JSON line."""
    table = functools.cache(lambda: tuple(process_discovery.all_processes()))  # once for all folders
    for node_dir in args.node_dirs:
        state = {"dir": str(node_dir), "alive": process_discovery.is_alive(node_dir, table)}
        # Check the lock first: a process that is gone by then has written everything.
        state |= {"node": read_json(node_dir / NODE), "outcome": read_json(node_dir / OUTCOME)}
        state["gone"] = not node_dir.is_dir()
        is_lost = not state["alive"] and not state["outcome"]
        state["remains"] = is_lost and any(process_discovery.run_processes(node_dir.parent, table))
        print(json.dumps(state | {"history": last_rows(node_dir / HISTORY)}))
    return Exit.OK


def send(args: argparse.Namespace) -> int:
    """Signal the ddprun of each folder, even if it is starting. With SIGKILL, kill all processes of the run."""
    signalled = {node_dir: _signal(node_dir, SIGNALS[args.name], args.find) for node_dir in args.node_dirs}
    deadline = time.monotonic() + args.wait
    while any(map(process_discovery.is_alive, args.node_dirs)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if args.name == "KILL":
        run_dirs = {node_dir.parent for node_dir in args.node_dirs}

        def find_pids() -> list[int]:
            return [pid for run_dir in run_dirs for pid, _ in process_discovery.run_processes(run_dir)]

        processes.kill_all(find_pids, timeout_s=max(0.0, deadline - time.monotonic()) + 2.0)
    for node_dir, sent in signalled.items():
        alive = process_discovery.is_alive(node_dir)
        if not alive and args.name == "KILL" and not (node_dir / OUTCOME).exists():
            with contextlib.suppress(OSError):
                node_dir.mkdir(exist_ok=True)
                KILLED_ON_REQUEST.write(node_dir)
        print(json.dumps({"dir": str(node_dir), "signalled": sent, "alive": alive}))
    return Exit.OK


def _signal(node_dir: Path, number: int, timeout_s: float) -> bool:
    """Signal the node's ddprun, and return whether it was found. Retry, because it may not hold its lock yet."""
    deadline = time.monotonic() + timeout_s
    while not (node_dir / OUTCOME).exists():
        if process_discovery.is_locked(node_dir):
            with contextlib.suppress(KeyError, TypeError, OSError):
                os.kill(int(read_json(node_dir / NODE)["pid"]), number)
                return True
        elif starters := tuple(process_discovery.starting_processes(node_dir)):
            for pid in starters:  # a shell that starts ddprun ignores SIGINT, and there is no rank yet to interrupt
                processes.kill(pid, signal.SIGTERM if number == signal.SIGINT else number)
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return False


def port(args: argparse.Namespace) -> int:
    """Print a free port as JSON."""
    if not 0 <= args.want <= MAX_PORT:
        print(f"port {args.want} is out of range: expected 1 to {MAX_PORT}, or 0 for a free port", file=sys.stderr)
        return Exit.USAGE
    try:
        listener = network.bind(args.host, args.want, listen=True) if args.want else network.bind_free_port(args.host)
    except OSError as error:
        print(network.describe_taken_port(args.host, args.want, error), file=sys.stderr)
        return Exit.UNAVAILABLE
    with listener:
        print(json.dumps({"port": listener.getsockname()[1]}))
    return Exit.OK


def gpus(_args: argparse.Namespace) -> int:
    """Print the GPUs that a job may use, one per line."""
    if (devices := devices_of_rank()) is None:
        import subprocess  # not needed by the other subcommands

        try:
            command = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIST_GPUS_S, check=False)
            code, text = done.returncode, done.stdout
            reason = f"{text}{done.stderr}".strip().rpartition("\n")[2]
        except FileNotFoundError:
            code, text, reason = NO_GPU[0], "", ""
        except subprocess.TimeoutExpired:
            code, text, reason = Exit.UNAVAILABLE, "", f"no answer within {LIST_GPUS_S:g} s"
        if code not in (0, *NO_GPU):
            print(f"nvidia-smi failed ({reason or f'exit code {code}'})", file=sys.stderr)
            return Exit.UNAVAILABLE
        lines = text.splitlines() if code == 0 else ()
        devices = tuple(line.strip() for line in lines if line.startswith(("GPU-", MIG)))  # it may also print warnings
    print("".join(f"{device}\n" for device in devices), end="")
    return Exit.OK


def logs(args: argparse.Namespace) -> int:
    """Print the logs of a run, or follow them."""
    try:
        has_logs = print_logs(args)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit does not fail
        if isinstance(error, BrokenPipeError):  # the reader has closed the pipe
            return Exit.OK
        print(f"the log cannot be printed: {error.strerror}", file=sys.stderr)
        return Exit.CANNOT_WRITE
    return Exit.OK if has_logs else Exit.NO_INPUT


def main() -> int:
    """Run one subcommand, and return its exit code."""
    args = parser().parse_args()
    return {"show": show, "signal": send, "port": port, "gpus": gpus, "logs": logs}[args.verb](args)


if __name__ == "__main__":
    sys.exit(main())
