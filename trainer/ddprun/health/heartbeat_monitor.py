"""Heartbeats and process states of this node's ranks, the detection of hung ranks, and stack dumps.

The silence of a rank begins when ddprun notices its last heartbeat. If a rank is stopped (SIGSTOP) before its first
heartbeat, its silence begins when ddprun notices the stop. A running rank does not count as silent before its first
heartbeat, because imports and compilation can take a long time. A time in which ddprun itself was paused does not count
as silence: the ranks were probably paused with it (docker pause, scontrol suspend, a virtual machine).
"""

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from ddprank.heartbeat import Beat, read_beat
from ddprun.output.logs import RankLogs
from ddprun.ranks.process_groups import AS_ONE_RANK
from ddprun.ranks.workers import Workers
from ddprun.system.file_writer import FileWriter, replace_file
from ddprun.system.processes import read_process
from ddpwire.run_files import RankProcess, rank_heartbeat

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
BUSY_CORES = 0.1  # cores; a rank that computes or waits for a GPU uses a whole one
MAX_GAP_S = 1.0  # of a longer time between two calls of ``statuses``, no more counts as silence
SPAWN_PROBE_S = 4.0  # a probe reads all processes and connections of the machine
SPAWN_IDLE_S = 10.0  # processes that import or connect are not idle for so long


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The current state of a rank. The node sends it to node 0 as part of its heartbeat."""

    rank: int
    node: int
    step: int | None  # None before the first heartbeat
    silent_s: float
    stopped: bool  # frozen by SIGSTOP
    busy: bool  # used CPU time since its step last changed, or since it was stopped or continued


class HeartbeatMonitor:
    """Reads the heartbeats and process states of the ranks of the current attempt."""

    def __init__(self, runtime: "os.PathLike[str]", node: int) -> None:
        self._runtime = runtime
        self._files: dict[int, BinaryIO] = {}  # of each rank that has sent a heartbeat: the path may vanish
        self._opening = threading.Lock()  # several threads open these files
        self._node = node
        # Of each rank, its step and whether it is stopped, and the time and its CPU seconds when either changed.
        self._changes: dict[int, tuple[tuple[int | None, bool], float, float]] = {}
        self._beats: dict[int, tuple[float, float]] = {}  # of each rank, its last heartbeat and when it was noticed
        self._called_at = 0.0
        self._now_s = 0.0  # a clock that stands still while ddprun is paused
        self._ranks: tuple[RankProcess, ...] = ()

    def forget(self) -> None:
        """Forget the heartbeats of an attempt that has ended. Call this after its files were removed."""
        with self._opening:
            while self._files:
                self._files.popitem()[1].close()

    def track(self, ranks: tuple[RankProcess, ...]) -> None:
        """From now on, read the heartbeats and states of these ranks, which belong to a new attempt."""
        self._changes, self._beats = {}, {}
        self._ranks = ranks

    def beat(self, rank: int) -> Beat:
        """Return what a rank has recorded, even after it has ended."""
        path = Path(self._runtime, rank_heartbeat(rank))
        with self._opening, contextlib.suppress(OSError):  # the file has vanished
            if rank not in self._files and read_beat(path).at_s:  # without a heartbeat, the rank may map another file
                self._files[rank] = path.open("rb", buffering=0)
        return read_beat(self._files.get(rank, path))

    def beats(self) -> dict[int, Beat]:
        """Return the last heartbeats of this attempt's ranks, keyed by rank. Ranks without a heartbeat are left out."""
        return {process.rank: beat for process in self._ranks if (beat := self.beat(process.rank)).at_s}

    def running_beats(self) -> dict[int, Beat]:
        """Return the last heartbeats of the ranks that have not ended, keyed by rank."""
        running = {process.rank for process in self._ranks if psutil.pid_exists(process.pid)}
        return {rank: beat for rank, beat in self.beats().items() if rank in running}

    def statuses(self, time_s: float | None = None) -> tuple[RankStatus, ...]:
        """Return the status of each rank that is alive, at ``time_s`` of the monotonic clock, by default now.

        Call this several times per second.
        """
        time_s = time.monotonic() if time_s is None else time_s
        self._now_s += min(time_s - self._called_at, MAX_GAP_S)
        self._called_at = time_s
        return tuple(status for rank in self._ranks if (status := self._status(rank)))

    def _status(self, process: RankProcess) -> RankStatus | None:
        current = read_process(process.pid)
        if current is None or not current.alive:
            return None
        rank, stopped, cpu_s = process.rank, current.state == "T", current.ticks / TICKS_PER_S
        now_s, beat = self._now_s, self.beat(rank)
        if self._beats.get(rank, (0.0, 0.0))[0] != beat.at_s:
            self._beats[rank] = beat.at_s, now_s
        key = beat.step, stopped
        if rank not in self._changes or self._changes[rank][0] != key:
            self._changes[rank] = key, now_s, cpu_s
        _, changed_at_s, cpu_s_before = self._changes[rank]
        since_s = now_s - changed_at_s
        silent_s = now_s - self._beats[rank][1] if beat.at_s else since_s if stopped else 0.0
        busy = cpu_s - cpu_s_before > BUSY_CORES * since_s
        return RankStatus(rank=rank, node=self._node, step=key[0], silent_s=silent_s, stopped=stopped, busy=busy)


def find_hung_rank(statuses: Sequence[RankStatus], timeout_s: float) -> RankStatus | None:
    """Return the rank that probably caused a hang, or None if no rank hangs.

    A rank that hangs blocks the others, so there is a hang only if all ranks that have sent heartbeats have been silent
    for ``timeout_s``. A stopped rank counts as hung even if other ranks still send heartbeats.
    """
    if not timeout_s:
        return None
    stopped = [status for status in statuses if status.stopped and status.silent_s > timeout_s]
    beating = [status for status in statuses if status.step is not None]
    if not stopped and not (beating and all(status.silent_s > timeout_s for status in beating)):
        return None
    last = min((status.step for status in stopped or beating if status.step is not None), default=None)
    behind = [status for status in stopped or beating if status.step == last]
    num_busy = sum(status.busy for status in behind)
    odd = 2 * num_busy < len(behind) and num_busy > 0  # a minority of the ranks is busy
    return min(behind, key=lambda status: (not status.stopped, status.busy != odd, status.rank))


def describe_hang(status: RankStatus, timeout_s: float) -> str:
    """Return a message about a hung rank: how long it was silent, its last step and whether it uses CPU time."""
    where = "before its first step" if status.step is None else f"after step {status.step}"
    state = "has been stopped by SIGSTOP" if status.stopped else f"uses {'' if status.busy else 'almost no '}CPU time"
    return f"no heartbeat for {status.silent_s:.0f} s (--hang-timeout {timeout_s:g}) {where}, and it {state}"


class SpawnWatch:
    """Detects that all executed ranks of a node have started further ranks, and that these further ranks block.

    The further ranks are started with torch.multiprocessing.spawn. They block if the script chooses the address of
    their store. Their environment says that an agent serves the store, so none of them serves it. Two criteria must
    hold. Each rank has spawned processes. For SPAWN_IDLE_S, no process of any rank has had a TCP connection or used CPU
    time.
    """

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self._ranks = {process.rank: process.pid for process in ranks}
        self._probed_at = self._idle_since = time.monotonic()
        self._cpu_s = 0.0

    def find(self) -> str:
        """Return a message if the ranks block, otherwise an empty string. Checks at most once per SPAWN_PROBE_S."""
        now, before_s = time.monotonic(), self._cpu_s
        since_s = now - self._probed_at
        if since_s < SPAWN_PROBE_S:
            return ""
        self._probed_at = now
        try:
            families = [[rank, *rank.children(recursive=True)] for rank in map(psutil.Process, self._ranks.values())]
            processes = {process.pid: process for family in families for process in family}
            self._cpu_s = sum(sum(process.cpu_times()[:2]) for process in processes.values())
            asleep = all(process.status() == psutil.STATUS_SLEEPING for process in processes.values())
            connections = [peer for peer in psutil.net_connections("tcp") if peer.raddr and peer.pid in processes]
            commands = (" ".join(arg for process in family for arg in process.cmdline()) for family in families)
            spawn = all("multiprocessing.spawn import spawn_main" in command for command in commands)
        except psutil.Error:  # a process has ended meanwhile, or the system does not show it
            return ""
        is_busy = not asleep or self._cpu_s - before_s > 0.05 * since_s  # cores; to try to connect needs less
        if connections or is_busy or not spawn:
            self._idle_since = now
        if now - self._idle_since < SPAWN_IDLE_S:
            return ""
        first, second = sorted(self._ranks)[:2]
        cause = f"ranks {first} and {second} each run a script that starts ranks itself"
        return f"no process group can form, because {cause}: {AS_ONE_RANK}"


def dump_stacks(
    path: Path, processes: Sequence[RankProcess], workers: Workers, output: RankLogs, files: FileWriter
) -> None:
    """Write each rank's /proc files and Python stacks into ``path``. This ends the ranks.

    Because of PYTHONFAULTHANDLER, a rank that receives SIGABRT writes its stacks to stderr and ends, even if its main
    thread runs C++ code. A stopped rank is continued, so that it can write its stacks. If ``path`` cannot be written,
    the ranks still end.
    """
    notes = [_proc_state(rank) for rank in processes]
    logs = [Path(rank.log) for rank in processes]
    sizes = [log.stat().st_size if log.exists() else 0 for log in logs]
    for rank in processes:  # a core dump would be large and add nothing to the stacks
        with contextlib.suppress(OSError, AttributeError):  # the rank has ended, or this is not Linux
            resource.prlimit(rank.pid, resource.RLIMIT_CORE, (0, 0))
    workers.signal(signal.SIGABRT)
    workers.signal(signal.SIGCONT)
    deadline = time.monotonic() + 1.0
    while workers.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in processes:
        output.catch_up(rank.rank)
    text = b""
    for rank, note, log, size in zip(processes, notes, logs, sizes, strict=True):
        text += f"==== rank {rank.rank} (pid {rank.pid})\n{note}".encode()
        with contextlib.suppress(OSError), log.open("rb") as stream:  # without its log, the note remains
            stream.seek(size)
            text += stream.read() + b"\n"
    files.submit(replace_file, path, text)


def _proc_state(rank: RankProcess) -> str:
    """Return lines from the files of a rank in /proc. Only root can read ``stack``, the kernel stack."""
    fields = ("State", "Threads", "VmRSS", "SigBlk", "SigIgn", "SigCgt")
    lines = []
    for name in ("status", "wchan", "stack"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{rank.pid}/{name}").read_text().strip().splitlines()
            if name == "status":
                lines += [line for line in text if line.partition(":")[0] in fields]
            else:
                lines += [f"{name}: {line}" for line in text]
    return "".join(f"{line}\n" for line in lines)
