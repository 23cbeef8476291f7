"""Notices: what became of the run, told to addresses and commands of the user (the job's ``notify``).

The node that decides tells it: node 0, or node 1 if node 0 was lost. A notice is recorded in node.json before it is
sent, and a recorded notice is never sent again, so that none arrives twice. If ddprun is killed in between, its record
stays "sending", and nobody can know whether it has arrived.
"""

import importlib.util
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ddprun.files.node_dir import Journal
from ddprun.ranks.node_commands import run_program, shell_command
from ddprun.ranks.rank_environment import node_environment
from ddprun.ranks.termination import Signals
from ddprun.settings.node_config import NodeConfig
from ddprun.system import processes
from ddprun.system.file_writer import FileWriter
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.run_files import Notice, NoticeEvent, Outcome

TIMEOUT_S = 20.0  # for one address or command
RECORD_S = 5.0  # for the disk to answer
MOST_NOTICES = 50  # that node.json keeps
MOST_LINES, MOST_CHARS = 20, 500  # of the output of one command in the log
RESTARTS: Mapping[str, NoticeEvent] = {"hang": "hang", "node_lost": "lost_node"}  # by the cause of the failure
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


class Notices:
    """Sends the notices of one node. None delays the ranks, or changes how the run ends."""

    def __init__(
        self, config: NodeConfig, environ: Mapping[str, str], journal: Journal, files: FileWriter, signals: Signals
    ) -> None:
        self.config = config  # a spare that takes the place of a node gets the settings of that node
        self._environ, self._signals = environ, signals
        self._journal, self._files = journal, files
        self._lock = threading.Lock()
        self._notices: list[Notice] = []
        self._threads: list[threading.Thread] = []
        self._others: set[int] = set()  # the processes below ddprun before the first notice

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
        event = None if self.config.check_only else self._end(outcome)
        if event and _decides(outcome, self.config):
            self.tell(event, outcome.message, outcome.attempt)

    def tell(self, event: NoticeEvent, message: str, attempt: int) -> None:
        """Send a notice to each address and command, unless the user does not want notices of this event."""
        if event not in self.config.notify_on:
            return
        # The environment of a process and the log cannot have these characters.
        message = message.encode(errors="replace").decode().replace("\0", "?")
        self._others = self._others or {*processes.descendants(os.getpid())}
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
        """Wait until the last notice has been sent or given up. Kill what the commands have left."""
        deadline = time.monotonic() + TIMEOUT_S + RECORD_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for pid in self.command_processes():
            processes.kill(pid, signal.SIGKILL)

    def command_processes(self) -> set[int]:
        """Return the processes of commands, also those in sessions of their own, whose parent is ddprun by then.

        They are the children of ddprun that have come since the first notice, and the descendants of these.
        """
        every = processes.list_processes() if self._threads else []
        children = {each.pid for each in every if each.parent == os.getpid()} - self._others
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
        text = f"{run}: {notice.event}, attempt {notice.attempt}: {message}"
        environ = node_environment(self.config, self._environ) | {
            names.NOTICE: notice.event,
            names.NOTICE_TEXT: text,
            names.NOTICE_TITLE: f"{run}: {notice.event}",
        }
        argv, lines = shell_command(target, environ), list[str]()
        if variable := _variable(target):
            argv = [sys.executable, "-P", "-c", SEND]
            environ |= {names.NOTICE_ADDRESS: self._environ.get(variable, "")}

        def on_line(line: str) -> None:
            if len(lines) < MOST_LINES:
                lines.append(line[:MOST_CHARS])
                self._journal.log(f"notify: {lines[-1]}")

        try:
            why, _ = run_program(argv, environ, time.monotonic() + TIMEOUT_S, on_line=on_line)
        except OSError as error:
            why = f"cannot start {argv[0]}: {error.strerror}"
        self._conclude(number, lines[-1] if why and variable and lines else why)

    def _conclude(self, number: int, why: str) -> None:
        """Record that a notice was sent, or why not."""
        with self._lock:
            notice = self._notices[number]
            self._notices[number] = replace(notice, state="failed" if why else "sent", why=why)
            self._record()
        if why:
            self._journal.log(f"the notice of '{notice.event}' could not be sent to {notice.to}: {why}")


def _variable(target: str) -> str:
    """Return the name of the variable that has the address, or "" if the target is a command."""
    match = re.fullmatch(names.NOTICE_VARIABLE, target)
    return match[1] if match else ""


def _decides(outcome: Outcome, config: NodeConfig) -> bool:
    if outcome.cause == "node_lost" and outcome.node == 0:
        # With spares, a machine that finds no majority does not know how the run goes on.
        return config.node_rank == 1 and not config.spares
    return config.node_rank == 0
