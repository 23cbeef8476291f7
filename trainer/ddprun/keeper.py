"""The parent of a node's ranks: a small process that starts them, sees them end, and leaves nothing behind.

It exists so that ranks have a parent without threads (which may fork safely, and whose death the kernel tells
them) and so that somebody is left to clear up when ddprun is SIGKILLed: at the end of file of the control socket it
kills every descendant and ends. Standard library only; it knows processes, not training.

Over the socket go JSON lines. To the keeper: {"do": "start", "tag", "argv", "env", "cwd", "cores"} with one descriptor
for the rank's stdout and stderr; {"do": "signal", "tag", "signal"}; {"do": "clear"}. From it: {"started": tag, "pid",
"plain"} (why it was executed, where it was to be forked: see zygote.py, which is the keeper's other form);
{"exited": tag, "status"} the instant waitpid tells, the status being subprocess' return code; {"cleared": true}
when no descendant is left.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ddprun import processes

CLEAR_TIMEOUT_S = 10.0  # only a process stuck in the kernel takes longer
# argv, env, cwd, cores, output → the pid, and why the rank was executed although it was to be forked
Start = Callable[[Sequence[str], Mapping[str, str], str, Sequence[int], int], tuple[int, str]]
# Whoever signals a whole process group or job step means the ranks, to which ddprun passes it on. Blocked, not ignored:
# a signal that reaches a rank between fork and exec must not be lost. ddprun starts the keeper with this mask.
NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Keeper:
    """The ranks that are alive, and the socket over which ddprun speaks of them."""

    def __init__(self, control: socket.socket, start: Start) -> None:
        self._control = control
        self._start = start
        self._descriptors: deque[int] = deque()  # received, one for each start that is still to be read
        self._ranks: dict[int, str] = {}  # pid → tag
        self._rest = b""

    def run(self, wakeups: socket.socket) -> None:
        """Serve until ddprun is gone, then clear up."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(wakeups, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if wakeups in ready:
                    wakeups.recv(4096)
                    self._reap()
                if self._control in ready and not self._serve():
                    break
        self._clear(timeout_s=60.0)

    def _serve(self) -> bool:
        """Do what has been asked for. False at the end of file: ddprun is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 16)
        except ConnectionError:
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors.extend(descriptors)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._do(json.loads(line))
        return bool(data)

    def _do(self, order: dict[str, Any]) -> None:
        if order["do"] == "start":
            output = self._descriptors.popleft()
            pid, plain = self._start(order["argv"], order["env"], order["cwd"], order["cores"], output)
            os.close(output)
            self._ranks[pid] = order["tag"]
            self._tell({"started": order["tag"], "pid": pid, "plain": plain})
        elif order["do"] == "signal":
            for pid in (pid for pid, tag in self._ranks.items() if tag == order["tag"]):
                processes.kill(pid, order["signal"])
        else:
            self._clear(timeout_s=CLEAR_TIMEOUT_S)
            self._tell({"cleared": True})

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                tag = self._ranks.pop(pid, None)
                if tag is not None:  # else an orphan that we had adopted
                    self._tell({"exited": tag, "status": os.waitstatus_to_exitcode(status)})
                    processes.kill_session(pid)

    def _clear(self, *, timeout_s: float) -> None:
        """Kill all, and tell of each rank's end before this returns."""
        deadline = time.monotonic() + timeout_s
        for pid in self._ranks:
            processes.kill(pid, signal.SIGKILL)
        processes.kill_below(os.getpid(), timeout_s=timeout_s, reap=self._reap)
        while self._ranks and time.monotonic() < deadline:  # a zombie is not waited for while its threads still end
            time.sleep(0.002)
            self._reap()

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # ddprun is gone: the end of file is next
            self._control.sendall(json.dumps(event).encode() + b"\n")


def start(argv: Sequence[str], env: Mapping[str, str], cwd: str, cores: Sequence[int], output: int) -> tuple[int, str]:
    """Fork and execute a rank, the leader of a session of its own; its pid."""
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
                signal.signal(number, signal.SIG_DFL)
            settle(cwd, cores, output, keeper)
            os.execvpe(argv[0], list(argv), env)  # noqa: S606 (to execute is what a rank is for)
        except OSError as error:
            cannot_start(argv, error)
    return pid, ""


def settle(cwd: str, cores: Sequence[int], output: int, keeper: int) -> None:
    """Give the forked child a rank's place: its streams, its session, its cores, its end with the keeper.

    Raises OSError.
    """
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.setsid()
    processes.die_with(keeper)
    if cores and sys.platform == "linux":
        with contextlib.suppress(OSError):  # they were taken from the cgroup meanwhile: to train elsewhere is better
            os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_US)  # what came meanwhile comes now
    os.chdir(cwd)


def cannot_start(argv: Sequence[str], error: OSError) -> NoReturn:
    """End the child that could not become a rank as a shell would."""
    os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def serve(control: socket.socket, start: Start) -> None:
    """Keep ranks for whoever holds the other end of ``control``, until it is gone and they are."""
    processes.adopt_orphans()
    wakeups, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    Keeper(control, start).run(wakeups)


def main() -> None:
    """Be a keeper of executed ranks; the last arguments are the node's lock and the socket."""
    for descriptor in map(int, sys.argv[-2:]):  # ours, not the ranks'
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=int(sys.argv[-1])) as control:
        serve(control, start)
