"""How a node ends: the signals that it receives, the stop of its ranks, and the kernel's OOM kills.

``Signals`` calls functions when signals arrive, or when the lifeline closes. The lifeline is a pipe from the process
that started ddprun. ``Stop`` ends the ranks with a signal, a grace period and SIGKILL. ``OomMonitor`` reads the
kernel's count of OOM kills.
"""

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ddprun.ranks.workers import Workers
from ddprun.settings.node_config import NodeConfig
from ddprun.system.errors import NodeError, config_error
from ddprun.system.restart_policy import describe_stop
from ddpwire import names
from ddpwire.exits import worth_a_retry
from ddpwire.machine import cgroups
from ddpwire.run_files import Outcome

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
POLL_S = 0.01  # a restart waits for the end of the ranks
SAME_REQUEST_S = 0.25  # a second signal within this time belongs to the same request as the first one
SLURM_SAME_REQUEST_S = 5.0  # scancel of Slurm 22.05 may send SIGTERM twice (docs/decisions/0009)


class Signals:
    """Calls ``on_stop``, ``on_forward`` and ``on_resize`` when signals arrive. The owner may replace these callbacks.

    Before ``listen`` is called, the main thread calls them. So this process has only one thread and may be forked.
    After ``listen``, a second thread calls them, because Python's own signal handlers do not run while the main thread
    waits in C++. The second thread gets the number of each signal at once, through ``set_wakeup_fd``. None of these
    signals kills ddprun by itself.
    """

    def __init__(self, on_stop: Callable[[int], None], on_forward: Callable[[int], None]) -> None:
        self.on_stop = on_stop
        self.on_forward = on_forward
        self.on_resize: Callable[[], None] = lambda: None  # called when the size of the terminal has changed
        self._listening = False
        self._stop_requested = False
        self.stop_reason = ""  # why ddprun itself requested the stop; empty if a signal did
        self._lifelines: list[int] = []
        self._read, write = socket.socketpair()
        write.setblocking(False)
        self._write = write  # kept open
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in (*STOP_SIGNALS, *FORWARDED_SIGNALS, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup ignores SIGHUP
                signal.signal(number, lambda number, _: self._handle_now(number))

    def listen(self) -> None:
        """Handle signals in a thread from now on."""
        self._listening = True
        for descriptor in self._lifelines:
            threading.Thread(target=self._watch, args=(descriptor,), name="lifeline", daemon=True).start()
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def stop(self, reason: str) -> None:
        """Act as on SIGTERM, unless a stop was already requested: a second request would end the grace period."""
        if self._stop_requested:
            return
        self.stop_reason = reason
        self._write.send(bytes([signal.SIGTERM]))

    def _handle_now(self, number: int) -> None:
        if not self._listening:
            self._read.recv(1)  # the thread would have read it
            self._dispatch(number)

    def watch_lifeline(self, descriptor: int) -> None:
        """Act as on SIGTERM when ``descriptor`` reaches the end of file.

        This means that the process that started ddprun has ended.
        """
        try:
            os.set_inheritable(descriptor, False)
        except (OSError, OverflowError):
            raise config_error(f"{names.LIFELINE_FD} is {descriptor}: no such descriptor is open") from None
        self._lifelines.append(descriptor)

    def _watch(self, descriptor: int) -> None:
        try:
            select.select([descriptor], [], [])
            while os.read(descriptor, 4096):
                pass
        except OSError:
            return  # it is not readable: no lifeline
        self.stop("the ddpctl process that started the run has ended")

    def _listen(self) -> None:
        while numbers := self._read.recv(64):
            for number in numbers:
                self._dispatch(number)

    def _dispatch(self, number: int) -> None:
        if number in STOP_SIGNALS:
            self._stop_requested = True
            self.on_stop(signal.SIGTERM if number == signal.SIGHUP else number)
        elif number in FORWARDED_SIGNALS:
            self.on_forward(number)
        elif number == signal.SIGWINCH:
            self.on_resize()


def stopped_before_start(number: int, node: int, reason: str = "") -> Outcome:
    """Return the outcome of a stop that was requested before there were any ranks."""
    code, message = 128 + number, f"{describe_stop(number, reason)} before the ranks had started"
    return Outcome(code=code, cause="stopped", message=message, node=node, retry=worth_a_retry(code))


class Stop:
    """Ends the ranks of this node, and records whether a stop was requested."""

    def __init__(self, workers: Workers, config: NodeConfig, log: Callable[[str], None]) -> None:
        self._workers, self._log = workers, log
        self._node, self._grace_s, self.signal = config.node_rank, config.grace_s, config.stop_signal
        self._same_request_s = SLURM_SAME_REQUEST_S if config.launcher == "slurm" else SAME_REQUEST_S
        self._sent = 0  # the stop signal sent to the ranks of this attempt, or 0
        self._deadline = self._requested_at = 0.0
        self.starting = threading.Lock()  # held while ranks are started, so that a signal reaches all of them
        self.requested = 0  # the signal that requested the stop, or 0
        self.reason = ""  # why, if no signal requested it
        self.leaves = False  # whether only this node stops, and another is started in its place
        self.on_leave: Callable[[], None] = lambda: None  # called before the ranks get the signal
        self.forwarded = 0  # the last signal that was forwarded to the ranks
        self.killed = False  # whether ranks were killed after their grace period, or on a second signal
        self.requested_again = False

    def request(self, number: int, *, leaves: bool = False) -> None:
        """Stop the ranks. The first request gives them a grace period. The second request kills them at once.

        A second signal within ``same_request_s`` belongs to the same request: Slurm, or a launcher and a process group,
        may deliver one request twice.
        """
        name = signal.Signals(number).name
        if self.requested:
            if time.monotonic() < self._requested_at + self._same_request_s:
                return
            self._log(f"{name} again: the ranks are killed")
            self.requested_again = True
            self._kill()
            return
        self.requested = self.forwarded = number
        self._requested_at = time.monotonic()
        self.leaves = leaves
        if leaves:
            self.on_leave()
        timer = threading.Timer(self._grace_s, self._kill)
        timer.daemon = True
        timer.start()
        with self.starting:
            if self._workers.alive:
                later = f" after {self._same_request_s:g} s" if self._same_request_s > 1 else ""
                kills, sent = "a" if self.reason else "a second", signal.Signals(self.sent_for(number)).name
                get = f" get {sent} and" if sent != name else ""
                notice = f"{self.reason or name}: the ranks{get} have {self._grace_s:g} s to end"
                self._log(f"{notice}; {kills} {name}{later} kills them")
            self._signal_ranks(self.sent_for(number), self._grace_s)

    def sent_for(self, number: int) -> int:
        """Return the signal that the ranks get after a request by the signal ``number``."""
        return self.signal if number == signal.SIGTERM else number

    def forward(self, number: int) -> None:
        """Forward a signal to the ranks."""
        self.forwarded = number

        def send() -> None:
            with self.starting:
                self._workers.signal(number)

        if self.starting.locked():  # this thread must stay free to handle the signals that follow
            threading.Thread(target=send, name="forward", daemon=True).start()
        else:
            send()

    def check(self) -> None:
        """Raise NodeError if a stop was requested."""
        if self.requested:
            raise NodeError(stopped_before_start(self.requested, self._node, self.reason), leaves=self.leaves)

    def new_attempt(self) -> None:
        """Start an attempt, whose ranks have received no signal yet."""
        self._sent = 0
        self.forwarded = self.requested

    def end_ranks(self, grace_s: float, number: int, *, on_wait: Callable[[], None]) -> None:
        """Send a stop signal to all ranks, and kill the remaining ranks after ``grace_s``.

        If the ranks have already received a stop signal, kill them after the rest of its grace period. While they have
        time to end, call ``on_wait``.
        """
        if not self._sent:
            self._signal_ranks(number, grace_s)
        while self._workers.alive and time.monotonic() < self._deadline:
            on_wait()
            time.sleep(POLL_S)
        self._workers.clear()

    def _signal_ranks(self, number: int, grace_s: float) -> None:
        if not self._sent:
            self._sent = number
            self._deadline = time.monotonic() + grace_s
            self._workers.signal(number)

    def _kill(self) -> None:
        self.killed = True
        self._workers.clear()


class OomMonitor:
    """Detects whether the kernel has killed a process of this node's memory cgroup.

    cgroup v2 counts kills in memory.events, v1 in memory.oom_control. Both count even if there is no limit.
    """

    def __init__(self, **places: Path) -> None:
        """``places`` are those of ``machine.cgroups``."""
        names = ("memory.events", "memory.oom_control")
        folders = cgroups("memory", **places)
        self._cgroup = next((folder for folder in folders if any((folder / name).exists() for name in names)), None)
        self._kills = self._read()

    def killed(self) -> bool:
        """Return whether the kernel has killed a process since the last call."""
        before, self._kills = self._kills, self._read()
        return self._kills > before

    def limit(self) -> str:
        """Describe the memory limit."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read_text(self._cgroup / name) if self._cgroup else ""
            if text.isdecimal() and int(text) < 1 << 60:  # v1 writes a number just below 2^63 for no limit
                return f"the limit of its cgroup is {int(text) / (1 << 30):.3g} GiB"
        return "the machine's memory was full"

    def _read(self) -> int:
        for name in ("memory.events", "memory.oom_control"):
            for line in (_read_text(self._cgroup / name) if self._cgroup else "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdecimal():
                    return int(value)
        return 0


def prefer_as_oom_victim(pid: int) -> None:
    """Make the kernel kill this rank or its children rather than ddprun when memory runs out.

    Otherwise the kernel could choose ddprun, which is large because it has torch in memory.
    """
    with contextlib.suppress(OSError, ValueError):
        score = int(Path("/proc/self/oom_score_adj").read_text()) + 500
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(1000, score)))  # the maximum (proc(5))


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
