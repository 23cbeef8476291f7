"""Runs the commands of all verbs on this machine and, with remote.py, on other machines.

Each process has its own session, except in tty mode. Therefore, Ctrl-C in the terminal sends SIGINT only to ddpctl.
"""

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any, TextIO

from ddpctl.command import NOT_FOUND, TIMED_OUT, Command, Output, T, Transfer, Verb, brief, remote_line, shell_line
from ddpctl.environment import tool_environment
from ddpctl.errors import CannotWriteError, DdpctlError, UnavailableError, writing
from ddpctl.execution.remote import Remote, write_bytes
from ddpctl.execution.transfers import Display, move, text_file
from ddpctl.text import plain
from ddpwire import names
from ddpwire.exits import Exit

_MAX_PARALLEL = 64
_CHUNK = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # looked up before any fork
OnInterrupt = Callable[[KeyboardInterrupt], None]  # it raises the exception again if it does not handle it


def end_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn``. It makes Linux kill the child process when this process ends."""
    parent = os.getpid()

    def ask() -> None:
        if _prctl:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent has already ended
                os._exit(0)

    return ask


class Executor:
    """Runs the commands of verbs. ``has_stdin`` says whether commands may read the stdin of this process."""

    def __init__(self, environ: Mapping[str, str], *, has_stdin: bool = True) -> None:
        self._environ = environ
        self._has_stdin = has_stdin
        self._remote = Remote(environ)
        self._lifeline: int | None = None  # the read end of the pipe that tethered processes have
        self._started: list[int] = []  # process IDs of the leaders of background sessions
        self._filter: Callable[[bytes], bytes] | None = None  # applied to streamed output
        self._message = ""  # the message of the last commands
        self.may_have_started = False  # whether a command with ``starts`` was run
        self.on_say: Callable[[str], object] = str  # called with the current message, which may be empty
        self._children: set[subprocess.Popen[Any]] = set()  # the processes that have not ended
        # One thread starts all children. Python drops an exception that is raised during a fork, such as a Ctrl-C in
        # the main thread. And for PR_SET_PDEATHSIG, the parent of a child is the thread that has forked it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="start")
        # It starts now: a thread whose start a Ctrl-C interrupts is unknown to Python, which waits for it at the end.
        self._starter.submit(bool)

    def perform(self, verb: Verb[T], on_interrupt: OnInterrupt | None = None) -> T:
        """Run the commands of a verb, and return its result.

        During a streamed command, each Ctrl-C calls ``on_interrupt``, and the command continues. Otherwise, Ctrl-C
        kills the commands and raises KeyboardInterrupt.
        """
        try:
            return _drive(verb, lambda commands: self._run_all(commands, on_interrupt))
        finally:
            self._remote.release()

    def dry_run(self, verb: Verb[T], out: TextIO) -> T:
        """Print the commands of a verb, and run only the commands that change nothing (``Command.probe``)."""

        def show(commands: tuple[Command, ...]) -> tuple[Output, ...]:
            probed = self._run_all(tuple(command for command in commands if command.probe), None)
            for line in _messages(commands).splitlines():
                print(f"# {line}", file=out)
            for command in commands:
                if not command.probe:
                    print(shell_line(command), file=out)
            answers = iter(probed)
            return tuple(
                next(answers) if command.probe else Output(returncode=0, stdout=command.placeholder)
                for command in commands
            )

        return _drive(verb, show)

    def filter_stdout(self, keep: Callable[[bytes], bytes]) -> None:
        """From now on, pass streamed output to ``keep``, and write the bytes that it returns to stdout."""
        self._filter = self._remote.keep = keep

    @contextmanager
    def sorted_stdout(self) -> Iterator[None]:
        """In the ``with`` block, sort the lines for stdout by their first word. This uses about 64 MB of memory."""
        argv, keep = ("env", "LC_ALL=C", "sort", "-s", "-k1,1", "-S64M"), self._filter or bytes
        with suppress(BrokenPipeError), subprocess.Popen(argv, stdin=subprocess.PIPE) as sort:
            self.filter_stdout(lambda data: (b"", sort.stdin.write(keep(data)))[0])  # type: ignore[union-attr]
            yield
        if sort.returncode > 0:
            raise CannotWriteError("")  # sort has already reported it

    def another(self) -> "Executor":
        """Return an executor for another thread, with the same environment and without stdin."""
        return Executor(self._environ, has_stdin=False)

    def close(self) -> None:
        """Close the connections to other machines."""
        self._remote.close()

    def kill_started(self) -> None:
        """Kill the background processes that this executor has started, to undo a failed launch."""
        for pid in self._started:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # still our child, so no other process has this number
            with suppress(OSError):
                os.waitpid(pid, 0)
        self._started.clear()

    def reap(self) -> None:
        """Reap the background processes that have ended. This is needed if one ddpctl process launches many runs."""
        for pid in tuple(self._started):
            with suppress(OSError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._started.remove(pid)

    def _run_all(self, commands: tuple[Command, ...], on_interrupt: OnInterrupt | None) -> tuple[Output, ...]:
        text = plain(_messages(commands))
        if text != self._message:
            self._message = text
            self.on_say(text)
            if text:
                print(text, file=sys.stderr, flush=True)
        self.may_have_started |= any(command.starts for command in commands)
        modes = {command.mode for command in commands}
        is_here = not any(command.host or command.transfer for command in commands)
        if "tty" in modes or (is_here and (len(commands) <= 1 or modes != {"capture"})):
            return tuple(self._run(command, on_interrupt) for command in commands)
        return self._run_in_parallel(commands, on_interrupt)

    def _run_in_parallel(self, commands: tuple[Command, ...], on_interrupt: OnInterrupt | None) -> tuple[Output, ...]:
        """Run commands in parallel threads. The calling thread waits for all commands, and handles Ctrl-C."""
        streams = sum(command.mode == "stream" for command in commands)
        if any(command.host or (command.transfer and command.transfer.rsync_to) for command in commands):
            self._remote.prepare(streams)
        display = Display([command.transfer for command in commands if command.transfer])
        numbers, before = count(), frozenset(self._children)
        pool = ThreadPoolExecutor(min(len(commands), _MAX_PARALLEL))
        try:
            # Here, because a Ctrl-C may interrupt the start of a thread: only the pool's shutdown ends such a thread.
            futures = [
                pool.submit(self._move, command, command.transfer, display, next(numbers))
                if command.transfer
                else pool.submit(self._run, command, None)
                for command in commands
            ]
            while True:
                try:
                    return tuple(future.result() for future in futures)
                except KeyboardInterrupt as error:
                    if on_interrupt is None or not streams:
                        raise
                    _handle_interrupt(on_interrupt, error)
        except BaseException:
            self._remote.close()  # commands that wait for an answer will not get one
            for process in self._children - before:  # not the streamed command that was interrupted
                _kill_session(process)
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            display.close()

    def _move(self, command: Command, transfer: Transfer, display: Display, number: int) -> Output:
        """Run a command that transfers files. OpenSSH's client connects to the other machine, if there is one."""
        argv, env = command.argv, {**command.env}
        if command.host:
            argv = (*self._remote.openssh(command.host), "--", command.host.address, remote_line(command))
        if transfer.rsync_to:
            env["RSYNC_RSH"] = shlex.join(self._remote.openssh(transfer.rsync_to))
        try:
            start = partial(self._child, replace(command, argv=argv, env=env), stdout=subprocess.PIPE)
            return move(command, transfer, start, display, number)
        except subprocess.TimeoutExpired:
            return Output(returncode=TIMED_OUT, stderr="the program closed its output, but did not exit")
        except FileNotFoundError as missing:
            return Output(returncode=NOT_FOUND, stderr=f"{missing.filename}: not found")

    def _run(self, command: Command, on_interrupt: OnInterrupt | None) -> Output:
        if command.host:
            remote = self._remote
            perform = {"capture": remote.capture, "stream": remote.stream, "hold": remote.hold, "tty": remote.hand_over}
            return perform[command.mode](command)
        try:
            if command.call:
                return _call(command.call)
            if command.mode == "background":
                return self._start(command)
            if command.mode == "stream":
                return self._stream(command, on_interrupt)
            return self._hand_over(command) if command.mode == "tty" else self._capture(command)
        except subprocess.TimeoutExpired:
            return Output(returncode=TIMED_OUT, stderr=f"no answer within {command.timeout_s:g} s")
        except OSError as error:
            raise UnavailableError(f"cannot run {brief(command)}: {error.strerror}") from None

    def _capture(self, command: Command) -> Output:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
        stdin = subprocess.DEVNULL if command.stdin is None else subprocess.PIPE
        try:
            with self._child(command, stdin=stdin, **streams) as process:
                stdout, stderr = process.communicate(command.stdin, command.timeout_s)
        except FileNotFoundError:
            return Output(returncode=NOT_FOUND, stderr=f"{command.argv[0]}: not found")
        return Output(returncode=process.returncode, stdout=stdout, stderr=stderr)

    def _stream(self, command: Command, on_interrupt: OnInterrupt | None) -> Output:
        out = {"stdout": subprocess.PIPE} if self._filter else {}
        with text_file(command.stdin) as stdin, self._child(command, stdin=stdin, **out) as process:
            if self._filter:
                copier = threading.Thread(target=_copy, args=(process.stdout, self._filter), daemon=True)
                copier.start()
            while True:
                try:
                    returncode = process.wait(command.timeout_s)
                    if self._filter:
                        copier.join()
                    return Output(returncode=returncode)
                except KeyboardInterrupt as error:
                    if on_interrupt is None:
                        raise
                    _handle_interrupt(on_interrupt, error)

    @contextmanager
    def _child(self, command: Command, **streams: Any) -> Iterator[subprocess.Popen[Any]]:
        """Start a process in its own session. At the end of the block, wait for the process.

        If the block raises an exception, kill the process.
        """

        def begin() -> subprocess.Popen[Any]:
            return subprocess.Popen(
                command.argv,
                env={**tool_environment(self._environ, command.argv[0]), **command.env},
                cwd=command.cwd,
                start_new_session=True,
                preexec_fn=end_with_parent(),
                **streams,
            )

        starting = self._starter.submit(begin)
        try:
            process = starting.result()
        except KeyboardInterrupt:
            process = starting.result()
            _kill_session(process)
            process.wait()
            raise
        self._children.add(process)
        try:
            yield process
        except BaseException:
            _kill_session(process)
            raise
        finally:
            process.wait()
            self._children.discard(process)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with suppress(OSError):
                        stream.close()

    def _hand_over(self, command: Command) -> Output:
        interrupts = []
        before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))  # SIG_IGN is inherited
        children = _children() if command.kills_orphans else []
        if command.kills_orphans and _prctl:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        env = {**tool_environment(self._environ, command.argv[0]), **command.env}
        begin = end_with_parent()
        try:
            done = subprocess.run(
                command.argv, env=env, cwd=command.cwd, timeout=command.timeout_s, preexec_fn=begin, check=False
            )
        finally:
            if command.kills_orphans and interrupts:
                _kill_orphans(children)
            signal.signal(signal.SIGINT, before)
        return Output(returncode=done.returncode)

    def _start(self, command: Command) -> Output:
        env = {**self._environ, **command.env}  # of a node, whose ranks get the user's variables
        env.pop(names.LIFELINE_FD, None)  # left over from another launcher
        keep: tuple[int, ...] = ()
        if command.tether:
            if self._lifeline is None:
                self._lifeline, _ = os.pipe()  # its write end closes when this process ends: that is the signal
            env[names.LIFELINE_FD] = str(self._lifeline)
            keep = (self._lifeline,)
        path = Path(command.output or os.devnull)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            output = path.open("ab")
        with output:
            process = subprocess.Popen(
                command.argv,
                env=env,
                cwd=command.cwd,
                stdin=None if command.stdin_inherited and self._has_stdin and _reads() else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=keep,
            )
        process.returncode = 0  # nobody waits for the process: avoids a warning when this object is deleted
        self._started.append(process.pid)
        return Output(returncode=0, stdout=f"{process.pid}\n")


def _drive(verb: Verb[T], run: Callable[[tuple[Command, ...]], tuple[Output, ...]]) -> T:
    """Run a verb to its end. ``run`` gets the commands that the verb yields, and returns their outputs."""
    try:
        commands = next(verb)
        while True:
            commands = verb.send(run(commands))
    except StopIteration as stop:
        result: T = stop.value
        return result


def _call(function: Callable[[], Any]) -> Output:
    try:
        return Output(returncode=Exit.OK, value=function())
    except DdpctlError as error:
        return Output(returncode=error.code, stderr=str(error))
    except OSError as error:
        path = error.filename2 or error.filename
        return Output(returncode=Exit.CANNOT_WRITE, stderr=f"{path}: {error.strerror}")


def _messages(commands: tuple[Command, ...]) -> str:
    """Return the distinct messages to print before these commands, one per line."""
    return "\n".join(filter(None, dict.fromkeys(command.say for command in commands)))


def _copy(pipe: IO[bytes], keep: Callable[[bytes], bytes]) -> None:
    with suppress(OSError):  # the reader of stdout has ended
        while data := os.read(pipe.fileno(), _CHUNK):
            write_bytes(sys.stdout, keep(data))


def _kill_session(process: subprocess.Popen[Any]) -> None:
    if process.returncode is None:  # else another process may have its number
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)


def _children() -> list[int]:
    pids: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            pids += map(int, path.read_text().split())
    return pids


def _kill_orphans(children: list[int]) -> None:
    """Kill the children of this process that are not in ``children``, and then the processes that they started."""
    while orphans := [pid for pid in _children() if pid not in children]:
        for pid in orphans:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):
                os.waitpid(pid, 0)


def _handle_interrupt(on_interrupt: OnInterrupt, error: KeyboardInterrupt) -> None:
    """Call ``on_interrupt``. If another Ctrl-C interrupts the call, call it again for that Ctrl-C."""
    while True:
        try:
            return on_interrupt(error)
        except KeyboardInterrupt as another:
            if another is error:
                raise
            error = another


def _reads() -> bool:
    """Return whether this process may read its stdin. Only the foreground processes of a terminal may read from it."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # stdin is no terminal, or not the one that controls this session
        return True
