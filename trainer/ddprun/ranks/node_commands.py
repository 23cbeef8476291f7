"""The job's own commands on a node: node_setup before ranks start, node_teardown after they have ended."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from signal import SIGKILL
from subprocess import DEVNULL, PIPE, STDOUT
from typing import BinaryIO, cast

from ddprun.output.progress import Progress
from ddprun.output.timed_log import MAX_LINE_BYTES
from ddprun.ranks.rank_environment import node_environment
from ddprun.ranks.workers import ROOT
from ddprun.settings.node_config import NodeConfig
from ddprun.system import processes
from ddpwire import names
from ddpwire.exits import Exit

POLL_S = 0.05
# The kernel kills the shell when ddprun ends, even if ddprun is killed. -I -S: Python starts in 20 ms.
EXEC_CODE = (
    "import os, sys; sys.path.append(sys.argv[1]); from ddprun.system.processes import die_with_parent; "
    "die_with_parent(int(sys.argv[2])); os.execv(sys.argv[3], sys.argv[3:])"
)


def shell_command(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return the arguments that run a shell command, in bash if there is one."""
    return [shutil.which("bash", path=environ.get("PATH")) or "/bin/sh", "-c", text]


def run_program(
    argv: Sequence[str],
    environ: Mapping[str, str],
    deadline: float,
    *,
    on_line: Callable[[str], None],
    on_wait: Callable[[], bool] = lambda: False,
) -> tuple[str, int]:
    """Run a program, whose path is absolute, in a session of its own. Return why it failed, or "", and its exit status.

    ``on_line`` gets each line of the output. ``on_wait`` is called while the program runs. The session is killed when
    it returns True, and at the deadline (of time.monotonic).
    """
    began, why = time.monotonic(), ""
    command = [sys.executable, "-I", "-S", "-c", EXEC_CODE, ROOT, str(os.getpid()), *argv]
    process = subprocess.Popen(
        command, env=environ, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )  # fmt: skip
    reader = threading.Thread(
        target=_pass_on, args=(cast(BinaryIO, process.stdout), on_line), name="output", daemon=True
    )
    reader.start()
    while process.poll() is None and not why:
        time.sleep(POLL_S)
        if time.monotonic() > deadline:
            why = f"did not end in time, and was killed after {time.monotonic() - began:.0f} s"
        elif on_wait():
            why = "was killed because the run ends"
    if why:
        processes.kill_session(process.pid)
        process.wait()
    reader.join(1.0)  # a process in the background may keep the pipe open
    if status := process.returncode:
        why = why or (f"exited with {status}" if status > 0 else f"was killed by signal {-status}")
    return why, status


def _pass_on(output: BinaryIO, on_line: Callable[[str], None]) -> None:
    while line := output.readline(MAX_LINE_BYTES):
        on_line(line.decode(errors="replace").rstrip())


class NodeCommands:
    """Runs the commands of this node, each in a shell of its own, and logs what they print."""

    def __init__(self, config: NodeConfig, environ: Mapping[str, str], log: Callable[[str], None]) -> None:
        self._config, self._environ, self._log = config, node_environment(config, environ), log
        self._before: set[int] = set()  # the processes below ddprun before the first command
        self._has_begun = self._is_set_up = False

    def set_up(self, *, gives_up: Callable[[], bool]) -> tuple[str, int]:
        """Run node_setup, unless it has run before. Return why a command failed, or "", and the exit code of the run.

        A running command is killed if ``gives_up`` returns True.
        """
        self._has_begun, deadline = True, time.monotonic() + self._config.setup_timeout_s
        for text in () if self._is_set_up else self._config.node_setup:
            why, code = self._run("node_setup", text, self._environ, deadline, gives_up)
            if why:
                return why, code
        self._is_set_up = True
        return "", 0

    def tear_down(self, code: int, spared: Collection[int] = ()) -> None:
        """Run all commands of node_teardown, if set_up was called. Kill what the commands of the node have left.

        ``code`` is the exit code of the run, which a failure does not change. ``spared``: processes of others.
        """
        deadline = time.monotonic() + self._config.teardown_timeout_s
        environ = self._environ | {names.EXIT_CODE: str(code)}
        for text in self._config.node_teardown if self._has_begun else ():
            if why := self._run("node_teardown", text, environ, deadline, lambda: False)[0]:
                self._log(f"{why}; the exit code of the run is still {code}")
        if self._before:  # ranks have ended: what is new has been left by commands, in whatever session it is
            for pid in {*processes.descendants(os.getpid())} - {*self._before, *spared}:
                processes.kill(pid, SIGKILL)

    def _run(
        self, key: str, text: str, environ: Mapping[str, str], deadline: float, gives_up: Callable[[], bool]
    ) -> tuple[str, int]:
        if time.monotonic() > deadline:
            return f"{key} failed: {text!r} was not started, because no time is left", int(Exit.SCRIPT)
        self._log(f"{key}: {text}")
        self._before = self._before or {*processes.descendants(os.getpid())}
        began, argv = time.monotonic(), shell_command(text, environ)
        progress = Progress(self._log, f"{key}: {text!r} is running")

        def on_wait() -> bool:
            progress.update()
            return gives_up()

        why, status = run_program(
            argv, environ, deadline, on_line=lambda line: self._log(f"{key}: {line}"), on_wait=on_wait
        )
        if why:
            return f"{key} failed: {text!r} {why}", status if 0 < status < 128 else int(Exit.SCRIPT)
        self._log(f"{key}: done after {time.monotonic() - began:.1f} s")
        return "", 0
