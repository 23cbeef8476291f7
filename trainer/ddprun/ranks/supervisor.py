"""The supervisor: a small process that starts a node's ranks, reaps them, and leaves no process behind.

The supervisor has no threads, so it can fork ranks safely. It uses only the standard library. The kernel kills the
ranks when the supervisor dies. When ddprun is SIGKILLed, the control socket closes, and the supervisor kills all its
descendants and ends.

The control socket carries JSON lines. ddprun sends:

- {"do": "start", "tag", "argv", "env", "cwd", "cores"}, with the descriptors of the rank's stdin, stdout and stderr
- {"do": "signal", "tag", "signal"}
- {"do": "clear"}

The supervisor sends:

- {"started": tag, "pid", "plain"}; "plain" is the reason why the rank was executed instead of forked (fork_server.py)
- {"exited": tag, "status"}; "status" is a return code as in the module subprocess
- {"cleared": true}, when no descendant is left
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

from ddprun.system import processes

Request = Mapping[str, Any]  # a request to start a rank
StartRank = Callable[[Request, Sequence[int]], tuple[int, str]]  # see exec_rank
# A signal to an entire process group or job step is for the ranks; ddprun forwards it to them. The supervisor
# blocks these signals and does not ignore them, because a signal that reaches a rank between fork and exec must not be
# lost. ddprun starts the supervisor with this mask.
BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """The ranks that are alive, and the socket through which ddprun controls them."""

    def __init__(self, control: socket.socket, start: StartRank) -> None:
        self._control = control
        self._start = start
        self._descriptors: deque[int] = deque()  # received, three for each start request that is still to be read
        self._ranks: dict[int, str] = {}  # pid → tag
        self._rest = b""

    def run(self) -> None:
        """Serve until the process at the other end of the socket has ended. Then kill all descendants that are left."""
        processes.adopt_orphans()
        wakeups, waker = socket.socketpair()
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
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
        """Handle the requests that have arrived. Return False at the end of file, which means that ddprun has ended."""
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

    def _do(self, request: dict[str, Any]) -> None:
        if request["do"] == "start":
            streams = [self._descriptors.popleft() for _ in range(3)]
            pid, plain = self._start(request, streams)
            for descriptor in streams:
                os.close(descriptor)
            self._ranks[pid] = request["tag"]
            self._send({"started": request["tag"], "pid": pid, "plain": plain})
        elif request["do"] == "signal":
            for pid in (pid for pid, tag in self._ranks.items() if tag == request["tag"]):
                processes.kill(pid, request["signal"])
        else:
            self._clear(timeout_s=10.0)  # only a process stuck in the kernel takes longer
            self._send({"cleared": True})

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                tag = self._ranks.pop(pid, None)
                if tag is not None:  # else an adopted orphan
                    self._send({"exited": tag, "status": os.waitstatus_to_exitcode(status)})
                    processes.kill_session(pid)

    def _clear(self, *, timeout_s: float) -> None:
        """Kill all descendants, and report the exit of each rank."""
        deadline = time.monotonic() + timeout_s
        for pid in self._ranks:
            processes.kill(pid, signal.SIGKILL)
        processes.kill_all(lambda: processes.descendants(os.getpid()), timeout_s=timeout_s, reap=self._reap)
        # waitpid does not return a zombie whose threads are still ending.
        while self._ranks and time.monotonic() < deadline:
            time.sleep(0.002)
            self._reap()

    def _send(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # ddprun is gone: the end of file follows
            self._control.sendall(json.dumps(event).encode() + b"\n")


def exec_rank(request: Request, streams: Sequence[int]) -> tuple[int, str]:
    """Fork and execute a rank as the leader of its own session, with ``streams`` as its stdin, stdout and stderr.

    Return its pid and an empty string.
    """
    argv, supervisor_pid = request["argv"], os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
                signal.signal(number, signal.SIG_DFL)
            set_up_rank(request, streams, supervisor_pid)
            os.execvpe(argv[0], unbuffered(argv), request["env"])  # noqa: S606 (the command is the user's)
        except OSError as error:
            exit_not_started(argv, error)
    return pid, ""


def unbuffered(argv: Sequence[str]) -> list[str]:
    """Return a rank's command, with -u for Python, so that the last output of a killed rank is not lost."""
    return [argv[0], "-u", *argv[1:]] if argv[0] == sys.executable else list(argv)


def set_up_rank(request: Request, streams: Sequence[int], supervisor_pid: int) -> None:
    """Set the child's streams, session, cores and folder, and make it die with the supervisor. Raises OSError."""
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    os.setsid()
    processes.die_with_parent(supervisor_pid)
    if request["cores"] and sys.platform == "linux":
        with contextlib.suppress(OSError):  # the cgroup no longer has these cores: train on others
            os.sched_setaffinity(0, request["cores"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)  # pending signals are delivered now
    os.chdir(request["cwd"])


def exit_not_started(argv: Sequence[str], error: OSError) -> NoReturn:
    """Report that the rank's command cannot be started.

    Then end this child process with the exit code that a shell uses: 127 if there is no such file, otherwise 126.
    """
    os.write(2, f"cannot start {argv[0]}: {error.strerror}\n".encode())
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def main() -> None:
    """Supervise ranks that are executed. The last arguments are descriptors: the node's lock and the socket."""
    for descriptor in map(int, sys.argv[-2:]):  # the ranks must not inherit these
        os.set_inheritable(descriptor, False)
    with socket.socket(fileno=int(sys.argv[-1])) as control:
        Supervisor(control, exec_rank).run()
