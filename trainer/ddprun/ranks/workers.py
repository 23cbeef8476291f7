"""The rank processes of this node, which ddprun starts, signals and watches through the supervisor."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddprun.output.progress import Progress
from ddprun.ranks import fork_server
from ddprun.ranks.supervisor import BLOCKED_SIGNALS
from ddprun.system import processes
from ddprun.system.errors import NodeError

ROOT = str(Path(__file__).parents[2])
# Isolated and without site-packages, the supervisor starts in 20 ms, whatever the user's environment contains.
SUPERVISOR_CODE = "import sys; sys.path.append(sys.argv[1]); from ddprun.ranks.supervisor import main; main()"
POLL_S = 0.5  # between two looks whether the supervisor was stopped
KILL_TIMEOUT_S = 3.0  # killed processes end within milliseconds, unless they sleep in the kernel


class SupervisorLostError(Exception):
    """Raised if the supervisor and its ranks have ended. ddprun also kills a supervisor that does not reply in time."""


class Workers:
    """The rank processes of this node. Each process is identified by the tag with which it was started."""

    on_exit: Callable[[str, int], None]  # tag, return code as in the module subprocess; called from a thread
    on_supervisor_lost: Callable[[], None]

    def __init__(
        self, argv: Sequence[str], *, lock_fd: int, fork: bool, log: Callable[[str], None], spared: int = 0
    ) -> None:
        """Start the supervisor. The owner must set the callbacks before it starts the first rank.

        If ``fork`` is set, the supervisor forks the ranks, and is itself a fork of this process. So this process must
        not have threads yet. Such a supervisor also imports the modules that a rank with the command ``argv`` needs. It
        does this before it starts the first rank. ``spared`` is the child of this process that is no rank's.
        """
        self.on_supervisor_lost = lambda: None
        self.on_give_up: Callable[[NodeError], None] = lambda _: None  # called before ddprun ends without its disk
        self._argv, self._log = argv, log
        self._lock_fd, self._spared = lock_fd, spared
        self._fork = fork
        self._exec_reason = ""
        self._reported_exec = self._has_replied = False
        self._alive: set[str] = set()
        self._send_lock = threading.Lock()
        self._request_lock = threading.Lock()  # one request at a time: replies do not name their request
        self._open()

    def _open(self) -> None:
        processes.adopt_orphans()  # if the supervisor is killed, its children become ours to kill
        self._control, theirs = socket.socketpair()
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        with theirs:
            self._pid = self._start_supervisor(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._lost = False
        channel = (self._control, self._replies)
        threading.Thread(target=self._listen, args=channel, name="supervisor", daemon=True).start()

    def _start_supervisor(self, control: socket.socket) -> int:
        if self._fork:
            try:
                return fork_server.fork_supervisor(self._lock_fd, control, self._argv)
            except fork_server.CannotForkError as error:
                self._fork, self._exec_reason = False, str(error)
        descriptors = (self._lock_fd, control.fileno())
        command = [sys.executable, "-I", "-S", "-c", SUPERVISOR_CODE, ROOT, *map(str, descriptors)]
        return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True).pid

    @property
    def alive(self) -> frozenset[str]:
        """Return the tags of the ranks that have not ended."""
        return frozenset(self._alive)

    @property
    def forks(self) -> bool:
        """Return True if the ranks are started with fork, or False if they are started with exec."""
        return self._fork and not self._exec_reason

    def start(
        self,
        tag: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: Sequence[int],
        cores: Collection[int] = (),
        gives_up: Callable[[], bool] = lambda: False,
    ) -> int:
        """Start a rank on ``cores`` (empty: the cores of this process). Return its pid. Raises SupervisorLostError.

        ``streams`` are its stdin, stdout and stderr. ``gives_up`` returns whether to stop waiting for the start.
        """
        if self._lost:
            if self._fork:  # this process has threads now
                self._fork, self._exec_reason = False, "the process that had imported torch was killed"
            self._open()
        self._alive.add(tag)
        options = {"cwd": str(Path.cwd()), "cores": sorted(cores)}
        request = {"do": "start", "tag": tag, "argv": list(argv), "env": dict(env)} | options
        reply = self._request(request, streams, gives_up)
        self._exec_reason = self._exec_reason or reply["plain"]
        if self._exec_reason and not self._reported_exec:
            self._reported_exec = True
            reason = f"because {self._exec_reason} (exec is slower than fork)"
            self._log(f"from now on, ranks are started with exec, {reason}")
        return int(reply["pid"])

    def signal(self, number: int) -> None:
        """Signal every rank that is alive."""
        for tag in self.alive:
            self._send({"do": "signal", "tag": tag, "signal": number})

    def clear(self) -> None:
        """Kill the ranks and all processes that they started with SIGKILL. Return when all of them have ended."""
        if not self._lost:
            with contextlib.suppress(SupervisorLostError):  # then no rank is left
                self._request({"do": "clear"})

    def continue_supervisor(self) -> None:
        """Continue the supervisor if SIGSTOP stopped it. A stopped supervisor starts no ranks and reports no exits."""
        if not self._lost and processes.is_stopped(self._pid):
            self._log(f"the supervisor of the ranks (pid {self._pid}) was stopped by SIGSTOP; ddprun sends it SIGCONT")
            processes.kill(self._pid, signal.SIGCONT)

    def _request(
        self, request: dict[str, Any], descriptors: Sequence[int] = (), gives_up: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        with self._request_lock:
            imports = self._fork and not self._has_replied
            limit_s = 300.0 if imports else 60.0  # imports from a cold disk, or on a busy machine, take minutes
            self._send(request, descriptors)
            progress = Progress(self._log, "importing the parts of torch that the ranks need")
            deadline = time.monotonic() + limit_s
            while time.monotonic() < deadline:
                with contextlib.suppress(queue.Empty):
                    reply = self._replies.get(timeout=POLL_S)
                    self._has_replied = True
                    if reply is None:
                        raise SupervisorLostError("the supervisor of the ranks was killed")
                    return reply
                self.continue_supervisor()
                if gives_up():
                    self.kill()
                    raise SupervisorLostError("a stop was requested while ranks were being started")
                if imports:
                    progress.update()
            self.kill()
            raise SupervisorLostError(f"the supervisor of the ranks did not answer within {limit_s:g} s")

    def kill(self) -> None:
        """Kill the supervisor with SIGKILL, which also ends its ranks.

        Wait a short time until their exits are handled.
        """
        processes.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(queue.Empty):  # the supervisor or a rank is stuck in the kernel
            while self._replies.get(timeout=KILL_TIMEOUT_S) is not None:
                pass

    def _send(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = json.dumps(request).encode() + b"\n"
        with self._send_lock, contextlib.suppress(OSError):  # the supervisor is gone: _listen handles it
            sent = socket.send_fds(self._control, [data], list(descriptors)) if descriptors else 0
            self._control.sendall(data[sent:])

    def _listen(self, control: socket.socket, replies: queue.Queue[dict[str, Any] | None]) -> None:
        # A ConnectionError means that the supervisor was killed before it read all requests.
        with control.makefile("rb") as lines, contextlib.suppress(ConnectionError):
            for line in lines:
                event = json.loads(line)
                if "exited" in event:
                    self._handle_exit(event["exited"], event["status"])
                else:
                    replies.put(event)

        def find_orphans() -> list[int]:
            return [pid for pid in processes.descendants(os.getpid()) if pid != self._spared]

        processes.kill_all(find_orphans, timeout_s=KILL_TIMEOUT_S, reap=processes.reap_all)
        self._lost = True  # from now on a start creates another supervisor, which must not be killed here
        self.on_supervisor_lost()
        for tag in self.alive:
            self._handle_exit(tag, -signal.SIGKILL)
        replies.put(None)

    def _handle_exit(self, tag: str, status: int) -> None:
        self._alive.discard(tag)
        self.on_exit(tag, status)
