"""The job's own commands on a node: node_setup before ranks start, node_teardown after they have ended."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
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

    def tear_down(self, code: int) -> None:
        """Run all commands of node_teardown, if set_up was called. Kill what the commands of the node have left.

        ``code`` is the exit code of the run, which a failure does not change.
        """
        deadline = time.monotonic() + self._config.teardown_timeout_s
        environ = self._environ | {names.EXIT_CODE: str(code)}
        for text in self._config.node_teardown if self._has_begun else ():
            if why := self._run("node_teardown", text, environ, deadline, lambda: False)[0]:
                self._log(f"{why}; the exit code of the run is still {code}")
        if self._before:  # ranks have ended: what is new has been left by commands, in whatever session it is
            for pid in {*processes.descendants(os.getpid())} - self._before:
                processes.kill(pid, SIGKILL)

    def _run(
        self, key: str, text: str, environ: Mapping[str, str], deadline: float, gives_up: Callable[[], bool]
    ) -> tuple[str, int]:
        if time.monotonic() > deadline:
            return f"{key} failed: {text!r} was not started, because no time is left", int(Exit.SCRIPT)
        self._log(f"{key}: {text}")
        self._before = self._before or {*processes.descendants(os.getpid())}
        progress = Progress(self._log, f"{key}: {text!r} is running")
        began, shell = time.monotonic(), shutil.which("bash", path=environ.get("PATH")) or "/bin/sh"
        argv = [sys.executable, "-I", "-S", "-c", EXEC_CODE, ROOT, str(os.getpid()), shell, "-c", text]
        process = subprocess.Popen(
            argv, env=environ, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
        )  # fmt: skip
        reader = threading.Thread(target=self._copy, args=(key, cast(BinaryIO, process.stdout)), name=key, daemon=True)
        reader.start()
        how = ""
        while process.poll() is None and not how:
            time.sleep(POLL_S)
            progress.update()
            if time.monotonic() > deadline:
                how = f"did not end in time, and was killed after {time.monotonic() - began:.0f} s"
            elif gives_up():
                how = "was killed because the run ends"
        if how:
            processes.kill_session(process.pid)
            process.wait()
        reader.join(1.0)  # a process in the background may keep the pipe open
        status = process.returncode
        if not (how or status):
            self._log(f"{key}: done after {time.monotonic() - began:.1f} s")
            return "", 0
        how = how or (f"exited with {status}" if status > 0 else f"was killed by signal {-status}")
        return f"{key} failed: {text!r} {how}", status if 0 < status < 128 else int(Exit.SCRIPT)

    def _copy(self, key: str, output: BinaryIO) -> None:
        while line := output.readline(MAX_LINE_BYTES):
            self._log(f"{key}: {line.decode(errors='replace').rstrip()}")
