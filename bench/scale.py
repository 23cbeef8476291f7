"""Measure what node 0 does as the number of nodes grows: calls of its store, CPU time, memory, threads and files.

    python bench/scale.py [--nodes 2 8 32 64 256 1000] [--seconds 10] [--json FILE]

Node 0 is a real ddprun with one rank, which imports nothing. This program plays the other nodes: for each of them it
makes the calls that a ddprun makes to node 0's store, over a connection of its own. The phases are

    wait      node 0 waits for the others, which connect, during --seconds or longer
    join      the others claim their numbers, compare builds and clocks, and arrive; until the group is chosen
    start     until node 0 has started its rank
    beat      heartbeats during --seconds
    failure   a rank of the last node fails; until all nodes are in the group of the next attempt
    end       all ranks exit with 0; until node 0 has ended

Store calls are those of node 0 itself: each is a round trip. The CPU time is that of node 0's ddprun, without its rank.
It contains the calls of the other nodes, which the store's thread in that process answers. A wall time says something
only if the machine is idle: this program and node 0 share it. "lag" is how late the played heartbeats were.
"""

import json
import mmap
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from measuring import clean_environ, free_port, options, wait_until, write_json

BEAT_S = 0.25  # ddprun.nodes.consensus.HEARTBEAT_INTERVAL_S
RUN_ID = "scale"
RANK = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.2)\n"
PHASES = ("wait", "join", "start", "beat", "failure", "end")
LASTING = ("wait", "beat")  # shown per second
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


def node_0(counts: str) -> None:
    """Run ddprun in this process, and keep the number of its store calls in the file ``counts``."""
    from ddprun import main as ddprun

    preload = ddprun.preload_torch

    def preload_and_count(*args: Any) -> None:
        preload(*args)
        count_calls(number)

    ddprun.preload_torch = preload_and_count
    Path(counts).write_bytes(bytes(COUNTS.size))
    with Path(counts).open("r+b") as file:
        number = mmap.mmap(file.fileno(), COUNTS.size)
    ddprun.main()


class Played:
    """The nodes from 1 on, as node 0 sees them."""

    def __init__(self, port: int, num_nodes: int) -> None:
        from torch.distributed import TCPStore

        self.num_nodes, self.calls, self.lag_s = num_nodes, 0, 0.0
        self._stores = [TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in self.nodes]
        self._beat_at = time.monotonic()

    @property
    def nodes(self) -> range:
        """The numbers of the nodes."""
        return range(1, self.num_nodes)

    def call(self, node: int, name: str, *args: Any) -> Any:
        """Make one call to node 0's store."""
        self.calls += 1
        return getattr(self._stores[node - 1], name)(*args)

    def join(self) -> None:
        """Claim the numbers and compare the builds, as ddprun does before it meets the others."""
        self._beat_at = time.monotonic()
        for node in self.nodes:
            first = json.loads(self.call(node, "get", "claim/0"))
            claim = json.dumps({**first, "token": f"played-{node}"})
            self.call(node, "compare_set", f"claim/{node}", "", claim)
            self._beat(node, 0)
            self.call(node, "get", "facts")
            self.call(node, "get", "arguments")
            for _ in range(3):  # ddpwire.clock
                number = self.call(node, "add", "clock/asked", 1)
                self.call(node, "set", f"clock/ask/{number}", "")
                self.call(node, "get", f"clock/answer/{number}")

    def arrive(self, attempt: int) -> dict[str, Any]:
        """Arrive at an attempt, and return its group. Exchange the numbers of ranks in its store, as elastic does."""
        from torch.distributed import TCPStore
        from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

        for node in self.nodes:
            self.call(node, "set", f"{attempt}/here/{node}", "")
        while not self.call(1, "check", [f"{attempt}/group"]):
            self.beats(attempt - 1)
            time.sleep(0.01)
        group: dict[str, Any] = json.loads(self.call(1, "get", f"{attempt}/group"))
        store = TCPStore("127.0.0.1", int(group["port"]), is_master=False, wait_for_workers=False)
        for node in self.nodes:
            info = _RoleInstanceInfo("default", node, 1).serialize()
            store.set(f"torchelastic/role_info/{node}", info)
        return group

    def beats(self, attempt: int) -> None:
        """Send the heartbeats that are due, and look for a decision."""
        if (late_s := time.monotonic() - self._beat_at) < 0:
            return
        self.lag_s = max(self.lag_s, late_s)
        self._beat_at = time.monotonic() + BEAT_S
        for node in self.nodes:
            self._beat(node, attempt)
            if attempt:
                self.call(node, "check", [f"{attempt}/verdict"])

    def _beat(self, node: int, attempt: int) -> None:
        sign = {"rank": node, "node": node, "step": None, "silent_s": 0.0, "stopped": False, "busy": False}
        beat = {"at": time.monotonic(), "attempt": attempt, "signs": [sign] if attempt else []}
        self.call(node, "set", f"beat/{node}", json.dumps(beat))

    def post(self, attempt: int, node: int, report: Mapping[str, object]) -> None:
        """Send a report to node 0."""
        number = self.call(node, "add", f"{attempt}/news", 1)
        self.call(node, "set", f"{attempt}/news/{number}", json.dumps(report))

    def follow(self, attempt: int) -> None:
        """Wait for the decision about an attempt, and report that the ranks are gone."""
        while not self.call(1, "check", [f"{attempt}/verdict"]):
            self.beats(attempt)
            time.sleep(0.005)
        for node in self.nodes:
            self.call(node, "add", f"{attempt}/gone", 1)


class Node0:
    """The process of node 0, and what each phase cost it."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self.port, self._counts = free_port(), folder / "counts"
        self.events, self.finish = folder / "run/node-0/events.jsonl", folder / "finish"
        (folder / "rank.py").write_text(RANK)
        argv = [__file__, "--node-0", str(self._counts), "--nnodes", str(num_nodes), "--node-rank", "0"]
        argv += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        argv += ["--run-dir", str(folder / "run"), "--rdzv-id", RUN_ID, "--join-timeout", "600", "--max-restarts", "3"]
        argv += [str(folder / "rank.py"), str(self.finish)]
        environ = clean_environ() | {"DDP_NODES_HERE": str(num_nodes), "DDP_DEVICE": "cpu"}
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen([sys.executable, *argv], env=environ, stdout=log, stderr=log)
        self._seen = psutil.Process(self.process.pid)
        self.phases: dict[str, dict[str, float]] = {}
        self.size: dict[str, float] = {}
        self._last = self._now()

    def _now(self) -> tuple[float, float, int]:
        cpu = 0.0
        with suppress(psutil.Error):
            times = self._seen.cpu_times()
            cpu = times.user + times.system
        with suppress(OSError, struct.error):
            return time.monotonic(), cpu, COUNTS.unpack(self._counts.read_bytes())[0]
        return time.monotonic(), cpu, 0

    def begin(self) -> None:
        """Begin a phase."""
        self._last = self._now()

    def end(self, phase: str, played: Played) -> None:
        """Note what the phase cost."""
        values = self._now()
        if not values[1]:
            return  # it has ended
        cost = self.phases.setdefault(phase, {"seconds": 0.0, "cpu_s": 0.0, "calls": 0, "others": 0})
        names = ("seconds", "cpu_s", "calls")
        for name, after, before in zip(names, values, self._last, strict=True):
            cost[name] += after - before
        cost["others"] += played.calls
        played.calls = 0
        with suppress(psutil.Error):
            self.size = (
                self.size
                if phase == "end"
                else {
                    "rss_mib": self._seen.memory_info().rss / 2**20,
                    "threads": self._seen.num_threads(),
                    "files": self._seen.num_fds(),
                }
            )
        self._last = self._now()

    def has(self, event: str) -> bool:
        """Return whether the event was recorded."""
        return self.events.exists() and f'"{event}"' in self.events.read_text()


def cost_cells(phase: str, cost: Mapping[str, float]) -> str:
    """Return the calls and the CPU seconds, per second for a phase that lasts as long as one likes."""
    per = cost["seconds"] if phase in LASTING else 1.0
    return f"{cost['calls'] / per:>15.0f}{cost['cpu_s'] / per:>8.3f}"


def measure(num_nodes: int, seconds: float) -> dict[str, Any]:
    """Run once with this number of nodes."""
    with tempfile.TemporaryDirectory(prefix="ddp-scale-") as name:
        node = Node0(num_nodes, Path(name))
        try:
            wait_until(lambda: node.has("preflight_done"), "node 0", timeout_s=120)
            node.begin()
            until = time.monotonic() + seconds
            played = Played(node.port, num_nodes)
            time.sleep(max(0.0, until - time.monotonic()))
            node.end("wait", played)
            played.join()
            played.arrive(1)
            node.end("join", played)
            wait_until(lambda: node.has("ranks_started"), "the rank", timeout_s=60)
            node.end("start", played)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                played.beats(1)
                time.sleep(0.01)
            node.end("beat", played)
            failure = {"node": num_nodes - 1, "rank": num_nodes - 1, "status": -signal.SIGKILL}
            played.post(1, num_nodes - 1, {"failure": failure})
            played.follow(1)
            decided = time.monotonic()
            played.arrive(2)
            node.end("failure", played)
            node.phases["failure"]["decided_s"] = node.phases["failure"]["seconds"] - (time.monotonic() - decided)
            node.finish.touch()
            for number in played.nodes:
                played.post(2, number, {"exited": number, "done": number})
            played.follow(2)
            deadline = time.monotonic() + 60
            while node.process.poll() is None and time.monotonic() < deadline:
                node.end("end", played)  # the last reading while there is a process
            node.process.wait(0)
            if node.process.returncode:
                sys.exit((Path(name) / "log").read_text())
            return {"nodes": num_nodes, "phases": node.phases, **node.size, "lag_s": played.lag_s}
        finally:
            if node.process.poll() is None:
                node.process.kill()
                print((Path(name) / "log").read_text()[-3000:], file=sys.stderr)


def main() -> None:
    """Print a table, one line for each number of nodes."""
    if sys.argv[1:2] == ["--node-0"]:
        counts, sys.argv[1:] = sys.argv[2], sys.argv[3:]
        node_0(counts)
        return
    parser = options(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 32, 64, 256, 1000])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    titles = [f"{phase}: {'calls/s' if phase in LASTING else 'calls'}" for phase in PHASES]
    print("nodes" + "".join(f"{title:>15}{'CPU s':>8}" for title in titles) + "   RSS MiB  threads  files  lag s")
    results = []
    for number in args.nodes:
        result = measure(number, args.seconds)
        results.append(result)
        cells = "".join(cost_cells(phase, result["phases"][phase]) for phase in PHASES)
        sizes = f"{result['rss_mib']:>10.0f}{result['threads']:>9}{result['files']:>7}{result['lag_s']:>7.2f}"
        print(f"{number:>5}{cells}{sizes}", flush=True)
    write_json(args.json, results)


if __name__ == "__main__":
    main()
