"""Measure what a start, training and a failure cost node 0 and another node with real agents, and torchrun beside them.

    python bench/scale.py [--nodes 64] [--seconds 10] [--agent ddprun torchrun] [--rounds 1] [--count]

All agents are forked from this process, which has imported torch and what both agents need. Each agent has one rank,
which imports nothing. torchrun uses its c10d rendezvous, whose store is in node 0's agent. The phases are

    start     until all ranks run
    beat      the ranks run, during --seconds
    failure   the rank of the last node is killed; until all ranks run again
    end       all ranks exit with 0; until all agents have ended

The CPU time is that of the agent alone, without its rank and the process that forks it. "agreed" is the time until
every node has heard of the failure, from ddprun's events. With --count, ddprun is also run once with counters: its
calls and bytes (keys and values in both directions) are those of its control store. The counters take CPU time, so that
this run is shown without. Wall times say something only if the machine is idle.
"""

import contextlib
import mmap
import os
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from measuring import free_port, in_turns, options, wait_until, write_json

from ddprun.ranks import fork_server
from ddprun.system import compat, processes
from ddpwire.events import read_events

RANK = """
import os, sys, time
open(f"{sys.argv[1]}/rank.{os.environ['RANK']}.{os.getpid()}", "w").close()
while not os.path.exists(f"{sys.argv[1]}/finish"):
    time.sleep(0.2)
"""
NAMES = ("set", "get", "compare_set", "multi_get", "check", "add", "delete_key", "wait")
COUNTS = struct.Struct("<qq")  # calls of the store, and their bytes


def count_calls(counts: mmap.mmap) -> None:
    """From now on, count the calls of ddprun's control store and their bytes."""
    from ddprun.system import stores

    def size(value: Any) -> int:
        if isinstance(value, bytes | str):
            return len(value)
        return sum(map(size, value)) if isinstance(value, list | tuple) else 8 * isinstance(value, int)

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            calls, num_bytes = COUNTS.unpack_from(counts)
            COUNTS.pack_into(counts, 0, calls + 1, num_bytes + size(args) + size(result))
            return result

        return call

    for name in NAMES:
        plain = getattr(stores.SignedStore, name, None) or (
            lambda self, *args, _name=name: getattr(self.wrapped, _name)(*args)
        )
        setattr(stores.SignedStore, name, counted(plain))


class Agents:
    """The agents of a run, and what each phase cost the first two."""

    def __init__(self, kind: str, num_nodes: int, folder: Path, *, counts: bool) -> None:
        self.kind, self.num_nodes, self.folder, self.port = kind, num_nodes, folder, free_port()
        self.is_counted = counts
        (folder / "rank.py").write_text(RANK)
        self.counts = [mmap.mmap(-1, COUNTS.size) for _ in range(num_nodes)]
        self.phases: dict[str, list[dict[str, float]]] = {}
        self.began = time.monotonic()
        self.pids = [self._fork(node) for node in range(num_nodes)]
        self._last = [(self.began, 0.0, 0, 0)] * 2

    def _fork(self, node: int) -> int:
        parent, pid = os.getpid(), os.fork()
        if pid:
            return pid
        try:
            processes.die_with_parent(parent)
            os.setsid()
            log = os.open(self.folder / f"log-{node}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for target, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
                os.dup2(descriptor, target)
            argv = ["--nnodes", self.num_nodes, "--nproc-per-node", 1, "--node-rank", node, "--max-restarts", 3]
            place = ["--master-addr", "127.0.0.1", "--master-port", self.port, "--run-dir", self.folder / "run"]
            place += ["--rdzv-id", "scale", "--join-timeout", "600"]
            c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "scale"]
            c10d += ["--rdzv-conf", f"is_host={int(not node)},join_timeout=600", "--local-addr", "127.0.0.1"]
            argv += [*(place if self.kind == "ddprun" else c10d), self.folder / "rank.py", self.folder]
            sys.argv = [self.kind, *map(str, argv)]
            os.environ |= {"DDP_NODES_HERE": str(self.num_nodes), "DDP_DEVICE": "cpu", "TORCH_CPP_LOG_LEVEL": "FATAL"}
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            if self.kind == "ddprun":
                from ddprun.main import main

                if self.is_counted:
                    count_calls(self.counts[node])
                main()
            else:
                from torch.distributed.run import main as torchrun

                torchrun(sys.argv[1:])
                os._exit(0)
        except SystemExit as leaving:
            os._exit(int(leaving.code or 0))
        finally:
            os._exit(1)

    def end(self, phase: str) -> None:
        """Note what the phase cost node 0 and node 1."""
        costs = []
        for node in range(2):
            cpu = self._last[node][1]
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(self.pids[node]).cpu_times()
                cpu = max(cpu, times.user + times.system)
            now = (time.monotonic(), cpu, *COUNTS.unpack_from(self.counts[node]))
            names = ("seconds", "cpu_s", "calls", "bytes")
            costs.append(dict(zip(names, (b - a for a, b in zip(self._last[node], now, strict=True)), strict=True)))
            self._last[node] = now
        self.phases[phase] = costs

    def started(self, times: int) -> bool:
        """Return whether all ranks have been started so many times."""
        for node, pid in enumerate(self.pids):
            if os.waitpid(pid, os.WNOHANG)[0]:
                sys.exit(f"the agent of node {node} has ended:\n" + (self.folder / f"log-{node}").read_text()[-2000:])
        return len([*self.folder.glob("rank.*.*")]) == times * self.num_nodes


def measure(kind: str, num_nodes: int, seconds: float, *, counts: bool = False) -> dict[str, Any]:
    """Run once."""
    with tempfile.TemporaryDirectory(prefix="ddp-scale-") as name:
        agents = Agents(kind, num_nodes, Path(name), counts=counts)
        try:
            wait_until(lambda: agents.started(1), "all ranks", timeout_s=900)
            agents.end("start")
            time.sleep(seconds)
            agents.end("beat")
            killed = time.time()
            (last,) = Path(name).glob(f"rank.{num_nodes - 1}.*")
            os.kill(int(last.suffix[1:]), signal.SIGKILL)
            wait_until(lambda: agents.started(2), "all ranks again", timeout_s=900)
            agents.end("failure")
            events = [read_events(path.read_text()) for path in Path(name).glob("run/node-*/events.jsonl")]
            failed = [event.time - killed for of_node in events for event in of_node if event.event == "failed"]
            (Path(name) / "finish").touch()
            pids = {*agents.pids}
            deadline = time.monotonic() + 300
            while pids and time.monotonic() < deadline:
                if agents.pids[0] in pids:
                    agents.end("end-so-far")
                pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
                time.sleep(0.02)
            agents.phases["end"] = agents.phases.pop("end-so-far")
            load = os.getloadavg()[0]
            return {
                "agent": kind, "nodes": num_nodes, "phases": agents.phases, "load": load, "left": len(pids),
                "agreed_s": max(failed, default=None), "heard": len(failed),
            }  # fmt: skip
        finally:
            for pid in agents.pids:
                processes.kill(pid, signal.SIGKILL)
            processes.kill_all(lambda: processes.descendants(os.getpid()), timeout_s=20.0, reap=processes.reap_all)


def main() -> None:
    """Print a line for each agent and phase."""
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--agent", nargs="+", choices=["ddprun", "torchrun"], default=["ddprun", "torchrun"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the agents end, too
    processes.adopt_orphans()
    fork_server.preload_torch(1)
    compat.import_dynamo()
    import torch.distributed.run
    import torch.nn.parallel  # noqa: F401

    import ddprun.agent
    import ddprun.bringup
    import ddprun.main  # noqa: F401

    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.agent}
    print(f"{'agent':<10}{'nodes':>6}{'phase':>9}{'seconds':>9}{'node 0: CPU s':>15}{'node 1: CPU s':>15}{'load':>7}")
    for _, kind in in_turns(args.agent, args.rounds):
        result = measure(kind, args.nodes, args.seconds)
        results[kind].append(result)
        for phase, costs in result["phases"].items():
            cells = "".join(f"{cost['cpu_s']:>15.3f}" for cost in costs)
            print(f"{kind:<10}{args.nodes:>6}{phase:>9}{costs[0]['seconds']:>9.1f}{cells}{result['load']:>7.1f}")
        print(f"{kind}: {result['heard']} nodes have heard of the failure after {result['agreed_s']} s", flush=True)
    for phase in ("start", "failure") if len(args.agent) == 2 else ():
        ours, theirs = (
            statistics.median(result["phases"][phase][0]["cpu_s"] for result in of) for of in results.values()
        )
        print(f"{phase}: node 0's CPU time is {ours / theirs:.2f} of torchrun's ({ours:.2f} of {theirs:.2f} s)")
    if args.count:
        for phase, costs in measure("ddprun", args.nodes, args.seconds, counts=True)["phases"].items():
            cells = "; ".join(f"{cost['calls']:.0f} calls, {cost['bytes']:.0f} bytes" for cost in costs)
            print(f"ddprun, {phase}, node 0 and node 1: {cells}")
    write_json(args.json, results)


if __name__ == "__main__":
    main()
