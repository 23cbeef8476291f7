"""ddprun's side of the keeper: start ranks, signal them, and hear of their end the instant it happens."""

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

from ddprun import processes, zygote
from ddprun.keeper import NOT_FOR_US
from ddprun.progress import Progress

ROOT = str(Path(__file__).parents[1])
# Isolated and without site-packages: up in 20 ms, whatever the user's environment holds.
KEEPER = "import sys; sys.path.append(sys.argv[1]); from ddprun.keeper import main; main()"
ANSWER_TIMEOUT_S = 60.0  # it comes at once,
IMPORT_TIMEOUT_S = 300.0  # but the first after the keeper's imports: from a cold disk, or on a busy machine
LOOK_S = 1.0
KILLED = -9


class KeeperLostError(Exception):
    """The keeper ended, and so have its ranks; or it does not answer."""


class Ranks:
    """The rank processes of this node, each known by the tag it was started under."""

    on_exit: Callable[[str, int], None]  # tag, subprocess' return code; called from a thread
    on_keeper_lost: Callable[[], None]
    on_plain: Callable[[str], None]  # why ranks are executed although they were to be forked; called once
    say: Callable[[str], None]  # what a person hears of a keeper that takes long

    def __init__(self, *, lock_fd: int, fork: bool) -> None:
        """Start the keeper. The owner sets the callbacks before the first rank is started.

        ``fork``: the keeper is a fork of this process, which must not have a thread yet, and forks the ranks.
        """
        self.on_keeper_lost = lambda: None
        self.say = lambda _: None
        self._lock_fd = lock_fd
        self._fork = fork
        self._why_plain = ""
        self._said_plain = self._has_answered = False
        self._alive: set[str] = set()
        self._sending = threading.Lock()
        self._asking = threading.Lock()  # one question at a time: answers come in their order
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._open()

    def _open(self) -> None:
        processes.adopt_orphans()  # should the keeper be killed, what it kept becomes ours to kill
        self._control, theirs = socket.socketpair()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_US)
        with theirs:
            self._start_keeper(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._answers = queue.Queue()
        self._lost = False
        threading.Thread(target=self._listen, args=(self._control,), name="keeper", daemon=True).start()

    def _start_keeper(self, control: socket.socket) -> None:
        if self._fork:
            try:
                zygote.fork(self._lock_fd, control)
                return
            except zygote.CannotForkError as error:
                self._fork, self._why_plain = False, str(error)
        descriptors = (self._lock_fd, control.fileno())
        command = [sys.executable, "-I", "-S", "-c", KEEPER, ROOT, *map(str, descriptors)]
        subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL, start_new_session=True)

    @property
    def alive(self) -> frozenset[str]:
        """The tags of the ranks that have not ended."""
        return frozenset(self._alive)

    def start(
        self, tag: str, argv: Sequence[str], env: Mapping[str, str], output: int, cores: Collection[int] = ()
    ) -> int:
        """Start a rank whose stdout and stderr are ``output``; its pid. Raises KeeperLostError.

        ``cores``: those that it may run on; none: where this process may.
        """
        if self._lost:
            if self._fork:  # this process has threads by now
                self._fork, self._why_plain = False, "the process that had torch was killed"
            self._open()
        self._alive.add(tag)
        place = {"cwd": str(Path.cwd()), "cores": sorted(cores)}
        order = {"do": "start", "tag": tag, "argv": list(argv), "env": dict(env)} | place
        answer = self._ask(order, (output,))
        self._why_plain = self._why_plain or answer["plain"]
        if self._why_plain and not self._said_plain:
            self._said_plain = True
            self.on_plain(self._why_plain)
        return int(answer["pid"])

    def signal(self, number: int) -> None:
        """Signal every rank that is alive."""
        for tag in self.alive:
            self._send({"do": "signal", "tag": tag, "signal": number})

    def clear(self) -> None:
        """SIGKILL the ranks and all that they started; return when they are gone."""
        if not self._lost:
            with contextlib.suppress(KeeperLostError):  # then there is nothing left to clear
                self._ask({"do": "clear"})

    def _ask(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._asking:
            self._send(order, descriptors)
            answer = self._answer()
        if answer is None:
            raise KeeperLostError("the keeper of the ranks was killed")
        return answer

    def _answer(self) -> dict[str, Any] | None:
        imports = self._fork and not self._has_answered
        limit_s = IMPORT_TIMEOUT_S if imports else ANSWER_TIMEOUT_S
        progress = Progress(self.say, "importing what the ranks need of torch")
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                answer = self._answers.get(timeout=LOOK_S)
                self._has_answered = True
                return answer
            if imports:
                progress.look()
        raise KeeperLostError(f"the keeper of the ranks did not answer within {limit_s:g} s")

    def _send(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = json.dumps(order).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):  # the keeper is gone: _listen says so
            sent = socket.send_fds(self._control, [data], list(descriptors)) if descriptors else 0
            self._control.sendall(data[sent:])

    def _listen(self, control: socket.socket) -> None:
        with control.makefile("rb") as lines:
            for line in lines:
                event = json.loads(line)
                if "exited" in event:
                    self._ended(event["exited"], event["status"])
                else:
                    self._answers.put(event)
        self._lost = True
        processes.kill_below(os.getpid(), timeout_s=10.0, reap=processes.reap_all)
        self.on_keeper_lost()
        for tag in self.alive:
            self._ended(tag, KILLED)
        self._answers.put(None)

    def _ended(self, tag: str, status: int) -> None:
        self._alive.discard(tag)
        self.on_exit(tag, status)
