"""``python -m ddprun.nodectl``: what a launcher asks and tells the ddpruns of the machine it runs on.

Answers are JSON lines on stdout. It is started often and must be quick: the standard library and ddpwire only.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ddprun import lock, look, ports, presence, processes
from ddprun.follow import print_logs
from ddpwire.exits import Exit
from ddpwire.folder import NODE, OUTCOME
from ddpwire.outcome import Outcome
from ddpwire.regular import read_regular

FIND_S = 0.3
SWEEP_S = 2.0
SIGNALS = {
    "TERM": signal.SIGTERM,
    "INT": signal.SIGINT,
    "KILL": signal.SIGKILL,
    "USR1": signal.SIGUSR1,
    "USR2": signal.SIGUSR2,
}


def parser() -> argparse.ArgumentParser:
    """The command line; its verbs are the functions below."""
    top = argparse.ArgumentParser(prog="nodectl", description="Ask and tell the ddpruns of this machine.")
    verbs = top.add_subparsers(dest="verb", required=True)
    show = verbs.add_parser("show", help="one JSON line a folder: alive, node.json, outcome.json")
    show.add_argument("node_dirs", metavar="NODE_DIR", nargs="+", type=Path)
    see = verbs.add_parser("look", help="one JSON line a folder: what its endpoint and its files say")
    see.add_argument("--metrics", action="store_true", help="fetch what the node exports")
    see.add_argument("--file", action="append", default=[], dest="files", metavar="NAME", help="a file of the folder")
    see.add_argument("--bytes", type=int, default=1 << 20, metavar="N", help="the last N bytes of each file")
    see.add_argument("node_dirs", metavar="NODE_DIR", nargs="+", type=Path)
    send = verbs.add_parser("signal", help="signal the ddprun of each folder")
    send.add_argument("--signal", choices=SIGNALS, default="TERM", dest="name")
    send.add_argument("--wait", type=float, default=0.0, metavar="S", help="wait up to S seconds for their end")
    send.add_argument("node_dirs", metavar="NODE_DIR", nargs="+", type=Path)
    port = verbs.add_parser("port", help="a free port, as {'port': 61234}")
    port.add_argument("--want", type=int, default=0, metavar="P", help="this one or none; 0: any")
    port.add_argument("--host", default="127.0.0.1")
    logs = verbs.add_parser("logs", help="print the nodes' logs")
    logs.add_argument("-f", "--follow", action="store_true", help="until every node has ended")
    logs.add_argument("--rank", type=int, action="append", default=[], dest="ranks", metavar="R")
    logs.add_argument("--node", type=int, action="append", default=[], dest="nodes", metavar="N")
    logs.add_argument("--tail", type=int, metavar="N", help="begin with the last N lines of each file")
    logs.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    return top


def read_json(path: Path) -> Any:
    """The file's content, or None where there is none to be read."""
    try:
        return json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None


def show(args: argparse.Namespace) -> int:
    """Print each folder's state."""
    for node_dir in args.node_dirs:
        state = {"dir": str(node_dir), "alive": presence.is_alive(node_dir)}
        # The lock first: whoever is gone by then has written all that it will ever write.
        print(json.dumps(state | {"node": read_json(node_dir / NODE), "outcome": read_json(node_dir / OUTCOME)}))
    return Exit.OK


def see(args: argparse.Namespace) -> int:
    """Print what there is to be seen of each node."""
    for node_dir in args.node_dirs:
        print(json.dumps(look.look(node_dir, tuple(args.files), metrics=args.metrics, max_bytes=args.bytes)))
    return Exit.OK


def send(args: argparse.Namespace) -> int:
    """Signal each folder's ddprun, also one without its lock yet. SIGKILL leaves nothing of the run behind."""
    signalled = {node_dir: _signal(node_dir, SIGNALS[args.name]) for node_dir in args.node_dirs}
    deadline = time.monotonic() + args.wait
    while any(map(presence.is_alive, args.node_dirs)) and time.monotonic() < deadline:
        time.sleep(presence.POLL_S)
    if args.name == "KILL":
        for run_dir in {node_dir.parent for node_dir in args.node_dirs}:
            presence.sweep(run_dir, timeout_s=max(0.0, deadline - time.monotonic()) + SWEEP_S)
    for node_dir, sent in signalled.items():
        alive = presence.is_alive(node_dir)
        if not alive and args.name == "KILL" and not (node_dir / OUTCOME).exists():
            _write_killed(node_dir)
        print(json.dumps({"dir": str(node_dir), "signalled": sent, "alive": alive}))
    return Exit.OK


def _write_killed(node_dir: Path) -> None:
    """The last word of a ddprun that was not left the time to say it."""
    outcome = Outcome(code=Exit.KILLED, cause="stopped", message="killed on request, without saving", retry=True)
    with contextlib.suppress(OSError):
        node_dir.mkdir(exist_ok=True)
        outcome.write(node_dir)


def _signal(node_dir: Path, number: int) -> bool:
    """Whether there was anybody to signal. A ddprun may be between its start and its lock: look more than once."""
    deadline = time.monotonic() + FIND_S
    while not (node_dir / OUTCOME).exists():
        if lock.is_held(node_dir):
            with contextlib.suppress(KeyError, TypeError, OSError):
                os.kill(int(read_json(node_dir / NODE)["pid"]), number)
                return True
        elif starters := tuple(presence.starting(node_dir)):
            for pid in starters:
                processes.kill(pid, number)
            return True
        if time.monotonic() > deadline:
            break
        time.sleep(presence.POLL_S)
    return False


def port(args: argparse.Namespace) -> int:
    """Print a free port."""
    if not 0 <= args.want < 65536:
        print(f"port {args.want} is out of range: 1 to 65535, or 0 for any", file=sys.stderr)
        return Exit.USAGE
    try:
        listener = ports.listen(args.host, args.want) if args.want else ports.listen_anywhere(args.host)
    except OSError as error:
        print(ports.taken(args.host, args.want, error), file=sys.stderr)
        return Exit.UNAVAILABLE
    with listener:
        print(json.dumps({"port": listener.getsockname()[1]}))
    return Exit.OK


def logs(args: argparse.Namespace) -> int:
    """Print, or follow, the logs of a run."""
    try:
        found = print_logs(args.run_dir, tuple(args.nodes), tuple(args.ranks), tail=args.tail, follow=args.follow)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is left to flush into
        if isinstance(error, BrokenPipeError):  # the reader has seen enough
            return Exit.OK
        print(f"the log cannot be printed: {error.strerror}", file=sys.stderr)
        return Exit.CANNOT_WRITE
    return Exit.OK if found else Exit.NO_INPUT


def main() -> int:
    """Run one verb."""
    args = parser().parse_args()
    verb = {"show": show, "look": see, "signal": send, "port": port, "logs": logs}[args.verb]
    return verb(args)


if __name__ == "__main__":
    sys.exit(main())
