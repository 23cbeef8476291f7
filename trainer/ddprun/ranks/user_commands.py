"""The commands of the user on a node: those of node_setup and node_teardown, and those that send notices.

node_setup runs before the ranks start, and node_teardown after they have ended.

Notices tell addresses and commands of the user what became of the run (the job's ``notify``). The node that decides
tells it: node 0, or node 1 if node 0 was lost. A notice is recorded in node.json before it is sent, and a recorded
notice is never sent again, so that none arrives twice. If ddprun is killed in between, its record stays "sending", and
nobody can know whether it has arrived.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from subprocess import DEVNULL, PIPE, STDOUT
from typing import BinaryIO, cast

from ddprun.files.node_dir import Journal
from ddprun.output.log_view import MAX_LINE_BYTES
from ddprun.output.progress import Progress
from ddprun.ranks.rank_environment import node_environment
from ddprun.ranks.termination import Signals
from ddprun.ranks.workers import ROOT
from ddprun.settings.node_config import NodeConfig
from ddprun.system import processes
from ddprun.system.file_writer import FileWriter
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.run_files import Notice, NoticeEvent, Outcome

POLL_S = 0.05  # between two looks at a running command
TIMEOUT_S = 20.0  # for one address or command of notify
RECORD_S = 5.0  # for the disk to answer
MOST_NOTICES = 50  # that node.json keeps
MOST_LINES, MOST_CHARS = 20, 500  # of the output of one command of notify in the log
RESTARTS: Mapping[str, NoticeEvent] = {"hang": "hang", "node_lost": "lost_node"}  # by the cause of the failure
# The kernel kills the shell when ddprun ends, even if ddprun is killed. -I -S: Python starts in 20 ms.
EXEC_CODE = (
    "import os, sys; sys.path.append(sys.argv[1]); from ddprun.system.processes import die_with_parent; "
    "die_with_parent(int(sys.argv[2])); os.execv(sys.argv[3], sys.argv[3:])"
)
# The address is a variable, because every user of the machine can read the arguments of a process. The messages of
# apprise are turned off, because they may contain the address.
SEND = f"""\
import logging, os, sys
try:
    import apprise
except ImportError:
    sys.exit("apprise is not installed on this node: pip install 'ddpctl[notify]'")
logging.disable()
sender = apprise.Apprise()
if not sender.add(os.environ["{names.NOTICE_ADDRESS}"]):
    sys.exit("apprise does not know this kind of address")
if not sender.notify(title=os.environ["{names.NOTICE_TITLE}"], body=os.environ["{names.NOTICE_TEXT}"]):
    sys.exit("apprise could not deliver it")
"""


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
    began, failure = time.monotonic(), ""
    command = [sys.executable, "-I", "-S", "-c", EXEC_CODE, ROOT, str(os.getpid()), *argv]
    process = subprocess.Popen(
        command, env=environ, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, start_new_session=True
    )  # fmt: skip
    reader = threading.Thread(
        target=_pass_on, args=(cast(BinaryIO, process.stdout), on_line), name="output", daemon=True
    )
    reader.start()
    while process.poll() is None and not failure:
        time.sleep(POLL_S)
        if time.monotonic() > deadline:
            failure = f"did not end in time, and was killed after {time.monotonic() - began:.0f} s"
        elif on_wait():
            failure = "was killed because the run ends"
    if failure:
        processes.kill_session(process.pid)
        process.wait()
    reader.join(1.0)  # a process in the background may keep the pipe open
    if status := process.returncode:
        failure = failure or (f"exited with {status}" if status > 0 else f"was killed by signal {-status}")
    return failure, status


def _pass_on(output: BinaryIO, on_line: Callable[[str], None]) -> None:
    while line := output.readline(MAX_LINE_BYTES):
        on_line(line.decode(errors="replace").rstrip())


class UserCommands:
    """Runs the commands of this node, and sends its notices. Each command has a shell of its own.

    What commands print is logged. No notice delays the ranks, or changes how the run ends.
    """

    def __init__(
        self, config: NodeConfig, environ: Mapping[str, str], journal: Journal, files: FileWriter, signals: Signals
    ) -> None:
        self.config = config  # a spare that takes the place of a node gets the settings of that node
        self._environ, self._signals = dict(environ), signals  # a copy: ddprun changes its own environment
        self._journal, self._files, self._log = journal, files, journal.log
        self._has_begun = self._is_set_up = False
        self._before_commands: set[int] = set()  # the processes below ddprun before the first command of the node
        self._before_notices: set[int] = set()  # the same, before the first notice
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        self._threads: list[threading.Thread] = []

    def set_up(self, *, gives_up: Callable[[], bool]) -> tuple[str, int]:
        """Run node_setup, unless it has run before. Return why a command failed, or "", and the exit code of the run.

        A running command is killed if ``gives_up`` returns True.
        """
        self._has_begun, deadline = True, time.monotonic() + self.config.setup_timeout_s
        for text in () if self._is_set_up else self.config.node_setup:
            failure, code = self._run("node_setup", text, {}, deadline, gives_up)
            if failure:
                return failure, code
        self._is_set_up = True
        return "", 0

    def tear_down(self, code: int) -> None:
        """Run all commands of node_teardown, if set_up was called. Kill what the commands of the node have left.

        ``code`` is the exit code of the run, which a failure does not change.
        """
        deadline = time.monotonic() + self.config.teardown_timeout_s
        for text in self.config.node_teardown if self._has_begun else ():
            more = {names.EXIT_CODE: str(code)}
            if failure := self._run("node_teardown", text, more, deadline, lambda: False)[0]:
                self._log(f"{failure}; the exit code of the run is still {code}")
        if self._before_commands:  # ranks have ended: what is new has been left by commands, in whatever session it is
            kept = self._before_commands | self._notice_processes()
            for pid in {*processes.descendants(os.getpid())} - kept:
                processes.kill(pid, signal.SIGKILL)

    def _run(
        self, key: str, text: str, more: dict[str, str], deadline: float, gives_up: Callable[[], bool]
    ) -> tuple[str, int]:
        """Run a command of the node. ``more``: variables besides those that all programs of the job have."""
        if time.monotonic() > deadline:
            return f"{key} failed: {text!r} was not started, because no time is left", int(Exit.SCRIPT)
        self._log(f"{key}: {text}")
        self._before_commands = self._before_commands or {*processes.descendants(os.getpid())}
        environ = node_environment(self.config, self._environ) | more
        began, argv = time.monotonic(), shell_command(text, environ)
        progress = Progress(self._log, f"{key}: {text!r} is running")

        def on_wait() -> bool:
            progress.update()
            return gives_up()

        failure, status = run_program(
            argv, environ, deadline, on_line=lambda line: self._log(f"{key}: {line}"), on_wait=on_wait
        )
        if failure:
            return f"{key} failed: {text!r} {failure}", status if 0 < status < 128 else int(Exit.SCRIPT)
        self._log(f"{key}: done after {time.monotonic() - began:.1f} s")
        return "", 0

    # Notices

    def problems(self) -> Iterator[str]:
        """Yield a line for each address that cannot get a notice."""
        addresses = [target for target in self.config.notify if _variable(target)]
        if addresses and not importlib.util.find_spec("apprise"):
            todo = "pip install 'ddpctl[notify]'"
            yield f"notify: no notice can be sent to {', '.join(addresses)}: apprise is not installed here ({todo})"
        for address in addresses:
            if not self._environ.get(_variable(address)):
                yield f"notify: no notice can be sent to {address}: the variable is not set on this node"

    def tell_restart(self, outcome: Outcome) -> None:
        """Tell that an attempt has failed and all ranks start again."""
        self.tell(RESTARTS.get(outcome.cause, "restarted"), outcome.message, outcome.attempt)

    def tell_end(self, outcome: Outcome) -> None:
        """Tell how the run has ended, if this node decides that."""
        config = self.config
        decides = config.node_rank == 0
        if outcome.cause == "node_lost" and outcome.node == 0:
            # With spares, a machine that finds no majority does not know how the run goes on.
            decides = config.node_rank == 1 and not config.spares
        if decides and not config.check_only and (event := self._end(outcome)):
            self.tell(event, outcome.message, outcome.attempt)

    def tell(self, event: NoticeEvent, message: str, attempt: int) -> None:
        """Send a notice to each address and command, unless the user does not want notices of this event."""
        if event not in self.config.notify_on:
            return
        # The environment of a process and the log cannot have these characters.
        message = message.encode(errors="replace").decode().replace("\0", "?")
        self._before_notices = self._before_notices or {*processes.descendants(os.getpid())}
        for target in self.config.notify:
            with self._lock:
                number = len(self._notices)
                self._notices.append(Notice(event=event, attempt=attempt, to=target, state="sending"))
                self._record()
            thread = threading.Thread(target=self._send, args=(number, target, message), name="notices", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError as error:  # the limit of processes
                self._conclude(number, str(error))

    def finish(self) -> None:
        """Wait until the last notice has been sent or given up. Kill what the commands of notify have left."""
        deadline = time.monotonic() + TIMEOUT_S + RECORD_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for pid in self._notice_processes():
            processes.kill(pid, signal.SIGKILL)

    def _notice_processes(self) -> set[int]:
        """Return the processes of notices, also those in sessions of their own, whose parent is ddprun by then.

        They are the children of ddprun that have come since the first notice, and the descendants of these.
        """
        every = processes.list_processes() if self._threads else []
        children = {each.pid for each in every if each.parent == os.getpid()} - self._before_notices
        return children.union(*(processes.descendants(pid) for pid in children))

    def _end(self, outcome: Outcome) -> NoticeEvent | None:
        if outcome.code == 0:
            return "succeeded"
        if outcome.cause != "stopped":
            return "failed"
        # Slurm and Kubernetes send the same SIGTERM for a preemption, a time limit and a user's stop.
        may_be_preempted = self.config.slurm_job or self.config.retries_network or self._signals.stop_reason
        return "preempted" if may_be_preempted and outcome.code != Exit.INTERRUPTED else None

    def _record(self) -> None:
        self._journal.update(notices=tuple(self._notices[-MOST_NOTICES:]))

    def _send(self, number: int, target: str, message: str) -> None:
        self._files.flush(RECORD_S)
        notice, run = self._notices[number], self.config.run_id
        environ = node_environment(self.config, self._environ) | {
            names.NOTICE: notice.event,
            names.NOTICE_TEXT: f"{run}: {notice.event}, attempt {notice.attempt}: {message}",
            names.NOTICE_TITLE: f"{run}: {notice.event}",
        }
        argv, lines = shell_command(target, environ), list[str]()
        if variable := _variable(target):
            argv = [sys.executable, "-P", "-c", SEND]
            environ |= {names.NOTICE_ADDRESS: self._environ.get(variable, "")}

        def on_line(line: str) -> None:
            if len(lines) < MOST_LINES:
                lines.append(line[:MOST_CHARS])
                self._log(f"notify: {lines[-1]}")

        try:
            failure, _ = run_program(argv, environ, time.monotonic() + TIMEOUT_S, on_line=on_line)
        except OSError as error:
            failure = f"cannot start {argv[0]}: {error.strerror}"
        self._conclude(number, lines[-1] if failure and variable and lines else failure)

    def _conclude(self, number: int, failure: str) -> None:
        """Record that a notice was sent, or why not."""
        with self._lock:
            notice = self._notices[number]
            self._notices[number] = replace(notice, state="failed" if failure else "sent", why=failure)
            self._record()
        if failure:
            self._log(f"the notice of '{notice.event}' could not be sent to {notice.to}: {failure}")


def _variable(target: str) -> str:
    """Return the name of the variable that has the address, or "" if the target is a command."""
    match = re.fullmatch(names.NOTICE_VARIABLE, target)
    return match[1] if match else ""
