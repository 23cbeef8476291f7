"""Runs commands: the one place of ddpctl that starts processes; ``remote`` runs those that have a host.

Each in a session of its own: a terminal's Ctrl-C is ddpctl's to judge, not the commands' to die of.
It knows nothing of targets: it takes ``Command`` values and gives ``Output`` values.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ddpctl.command import Command, Output, T, Verb, shell_line
from ddpctl.errors import CannotWriteError, UnavailableError
from ddpctl.remote import Remote
from ddpwire import names

_NOT_FOUND, _TOOK_TOO_LONG = 127, 124
_MAX_PARALLEL = 64


class Runner:
    """Performs commands on this machine, and holds the lifeline of those that must end with it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._remote = Remote(environ)
        self._lifeline: int | None = None  # the read end; the write end stays open until this process ends
        self._started: list[int] = []  # leaders of the sessions that were put into the background

    def perform(self, verb: Verb[T], on_interrupt: Callable[[], None] | None = None) -> T:
        """Run a target's verb to its end.

        ``on_interrupt`` is called at each Ctrl-C while a streamed command goes on; without it, and while
        anything else runs, Ctrl-C is raised as ever.
        """
        try:
            commands = next(verb)
            while True:
                commands = verb.send(self._run_all(commands, on_interrupt))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def rehearse(self, verb: Verb[T], out: TextIO) -> T:
        """A dry run: print every command instead, but look where a command only looks (``probe``)."""
        try:
            commands = next(verb)
            while True:
                looked = iter(self._run_all(tuple(command for command in commands if command.probe), None))
                outputs: list[Output] = []
                for command in commands:
                    if command.probe:
                        outputs.append(next(looked))
                    else:
                        print(shell_line(command), file=out)
                        outputs.append(Output(returncode=0, stdout=command.placeholder))
                commands = verb.send(tuple(outputs))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def close(self) -> None:
        """Let go of the other machines."""
        self._remote.close()

    def kill_started(self) -> None:
        """SIGKILL what this runner has put into the background: a launch that came to nothing takes it back."""
        for pid in self._started:
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)  # our child until we end, so the number is nobody else's
            with suppress(OSError):
                os.waitpid(pid, 0)
        self._started.clear()

    def reap(self) -> None:
        """Forget those that have ended; for a process that outlives many runs."""
        for pid in tuple(self._started):
            with suppress(OSError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._started.remove(pid)

    def _run_all(self, commands: tuple[Command, ...], on_interrupt: Callable[[], None] | None) -> tuple[Output, ...]:
        if not commands:
            return ()
        if any(command.host for command in commands) and not any(command.mode == "tty" for command in commands):
            return self._side_by_side(commands, on_interrupt)
        if len(commands) == 1 or any(command.mode != "capture" for command in commands):
            return tuple(self._run(command, on_interrupt) for command in commands)
        with ThreadPoolExecutor(min(len(commands), _MAX_PARALLEL)) as pool:
            return tuple(pool.map(self._capture, commands))

    def _side_by_side(
        self, commands: tuple[Command, ...], on_interrupt: Callable[[], None] | None
    ) -> tuple[Output, ...]:
        """Commands of which some are other machines'. Ctrl-C is this thread's, and ends the wait for all of them."""
        self._remote.prepare()
        streams = any(command.mode == "stream" for command in commands)
        pool = ThreadPoolExecutor(min(len(commands), _MAX_PARALLEL))
        futures = [pool.submit(self._run, command, None) for command in commands]
        try:
            while True:
                try:
                    return tuple(future.result() for future in futures)
                except KeyboardInterrupt:
                    if on_interrupt is None or not streams:
                        raise
                    _undisturbed(on_interrupt)
        except BaseException:
            self._remote.close()  # what waits for an answer gets none any more
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, command: Command, on_interrupt: Callable[[], None] | None) -> Output:
        if command.host:
            perform = {"capture": self._remote.capture, "stream": self._remote.stream, "tty": self._remote.hand_over}
            return perform[command.mode](command)
        if command.mode == "background":
            return self._start(command)
        if command.mode == "stream":
            return self._stream(command, on_interrupt)
        if command.mode == "tty":
            return self._hand_over(command)
        return self._capture(command)

    def _capture(self, command: Command) -> Output:
        try:
            done = subprocess.run(
                command.argv,
                env={**self._environ, **command.env},
                cwd=command.cwd,
                **({"stdin": subprocess.DEVNULL} if command.stdin is None else {"input": command.stdin}),
                start_new_session=True,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=command.timeout_s,
                check=False,
            )
        except FileNotFoundError:
            return Output(returncode=_NOT_FOUND, stderr=f"{command.argv[0]}: not found")
        except subprocess.TimeoutExpired:
            return Output(returncode=_TOOK_TOO_LONG, stderr=f"no answer within {command.timeout_s:g} s")
        except OSError as error:
            raise UnavailableError(f"cannot run {shell_line(command)}: {error.strerror}") from None
        return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def _stream(self, command: Command, on_interrupt: Callable[[], None] | None) -> Output:
        try:
            process = subprocess.Popen(
                command.argv,
                env={**self._environ, **command.env},
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"cannot run {shell_line(command)}: {error.strerror}") from None
        try:
            while True:
                try:
                    return Output(returncode=process.wait(command.timeout_s))
                except KeyboardInterrupt:
                    if on_interrupt is None:
                        raise
                    _undisturbed(on_interrupt)
        except subprocess.TimeoutExpired:
            return Output(returncode=_TOOK_TOO_LONG, stderr=f"not done within {command.timeout_s} s")
        finally:
            process.kill()
            process.wait()

    def _hand_over(self, command: Command) -> Output:
        """The terminal is the command's, Ctrl-C as well."""
        before = signal.signal(signal.SIGINT, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited
        try:
            done = subprocess.run(
                command.argv,
                env={**self._environ, **command.env},
                cwd=command.cwd,
                timeout=command.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Output(returncode=_TOOK_TOO_LONG, stderr=f"not done within {command.timeout_s} s")
        except OSError as error:
            raise UnavailableError(f"cannot run {shell_line(command)}: {error.strerror}") from None
        finally:
            signal.signal(signal.SIGINT, before)
        return Output(returncode=done.returncode)

    def _start(self, command: Command) -> Output:
        env = {**self._environ, **command.env}
        env.pop(names.LIFELINE_FD, None)  # another launcher's, left over
        keep: tuple[int, ...] = ()
        if command.tether:
            if self._lifeline is None:
                self._lifeline, _ = os.pipe()  # neither end is closed before this process ends: that is its use
            env[names.LIFELINE_FD] = str(self._lifeline)
            keep = (self._lifeline,)
        path = Path(command.output or os.devnull)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            output = path.open("ab")
        except OSError as error:
            raise CannotWriteError(f"cannot write {path}: {error.strerror}") from None
        with output:
            try:
                process = subprocess.Popen(
                    command.argv,
                    env=env,
                    cwd=command.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=keep,
                )
            except OSError as error:
                raise UnavailableError(f"cannot start {shell_line(command)}: {error.strerror}") from None
        process.returncode = 0  # it is not ours to wait for: no warning when this object goes
        self._started.append(process.pid)
        return Output(returncode=0, stdout=f"{process.pid}\n")


def _undisturbed(on_interrupt: Callable[[], None]) -> None:
    """Tell of a Ctrl-C, and of each that comes while the last one is being seen to."""
    while True:
        try:
            return on_interrupt()
        except KeyboardInterrupt:
            continue
