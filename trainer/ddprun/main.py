"""The road of a node: contract → lock → bring-up → outcome. It decides their order, and how ddprun itself ends.

Signals are listened to first. Nothing heavy is imported before the node has its lock and its node.json, and has found
its way to node 0: what is wrong with that is said at once. No thread is alive when the ranks' keeper is forked, whose
forks are the ranks.
"""

import contextlib
import os
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from ddprun import contract as contracts
from ddprun import deadline, machine, options, preflight, progress, zygote
from ddprun.contract import Contract
from ddprun.errors import NodeError, refused
from ddprun.farewell import farewell
from ddprun.journal import Journal
from ddprun.logs import NUM_LAST_LINES, Console, last_lines, without_torchs_prefix
from ddprun.losses import Losses
from ddprun.nodedir import NodeDir, claim, leave_word
from ddprun.push import push
from ddprun.ranks import Ranks
from ddprun.registration import deregister
from ddprun.report import Report
from ddprun.share import share, told
from ddprun.signals import Signals
from ddprun.stop import before_the_ranks
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.folder import rank_log
from ddpwire.node import NodeState
from ddpwire.outcome import Outcome

DRAIN_S = 5.0
CRASH_LOG = "ddprun-crash.log"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How this node takes its leave, whichever thread says so; the first to say it has the word."""

    contract: Contract
    folder: NodeDir
    journal: Journal
    console: Console
    once: threading.Lock

    def __call__(self, outcome: Outcome) -> NoReturn:
        """Write the outcome, say it, and end at once: to take the interpreter down costs a second with torch in it."""
        self.once.acquire()
        node = self.contract.node_rank
        self.journal.update(state="failed" if outcome.code else "succeeded")
        self.journal.tell(
            "node_ended",
            code=outcome.code,
            cause=outcome.cause,
            message=outcome.message,
            seconds=time.time() - self.journal.state.started,
        )
        try:
            outcome.write(self.folder.path)
        except OSError as error:
            self.console.say(f"the outcome cannot be written into {self.folder.path}: {error.strerror}")
        deregister(self.contract)
        push(self.contract, outcome, started=self.journal.state.started, say=self.console.say)
        if outcome.code:
            if outcome.node == node and outcome.rank is not None and outcome.cause != "stopped":
                log = last_lines(self.folder.path / rank_log(outcome.rank), NUM_LAST_LINES)
                lines = [without_torchs_prefix(line.encode(), outcome.rank).decode() for line in log]
                if lines and not self.console.has_just_said(f"[node{node} rank{outcome.rank}] {lines[-1]}\n"):
                    for line in lines:
                        self.console.say(f"rank {outcome.rank} said: {line}")
            here = self.contract.on_one_machine
            if word := farewell(outcome, node=node, folder=self.folder.path, on_one_machine=here):
                self.console.say(word)
        elif self.folder.is_temporary:
            shutil.rmtree(self.folder.path.parent, ignore_errors=True)
        self.console.drain(DRAIN_S)
        os._exit(outcome.code)


def main() -> NoReturn:
    """Run one node and end the process with the outcome's code."""
    signals = Signals(on_stop=lambda number: os._exit(128 + number), on_pass=lambda _: None)
    asked = options.parse(sys.argv[1:])
    try:
        contract = contracts.read(asked, os.environ, count, now=time.time())
        node = contract.node_rank
        state = NodeState(run=contract.run_id, node=node, pid=os.getpid(), state="starting", started=time.time())
        if contract.lifeline_fd is not None:
            signals.watch_lifeline(contract.lifeline_fd)
        folder = claim(contract, state)
    except NodeError as error:
        print(f"ddprun: {error}", file=sys.stderr)
        leave_word(error.outcome, asked.run_dir or os.environ.get(names.RUN_DIR), os.environ.get(names.NODE_RANK))
        sys.exit(error.outcome.code)
    console = Console(f"node{node}")
    journal = Journal(folder.path, state, console)
    end = Ending(contract=contract, folder=folder, journal=journal, console=console, once=threading.Lock())
    signals.on_stop = lambda number: end(before_the_ranks(number, node))
    losses = Losses(
        began_at=time.monotonic(), requeued_s=max(0.0, state.started - folder.before.heard_at) if folder.before else 0.0
    )
    journal.tell("node_started", host=socket.gethostname(), pid=state.pid, **losses.requeued)

    report = Report(journal.say, quiet=contract.on_one_machine)

    def run() -> Outcome:
        own = share(contract, os.environ)
        way: preflight.Way | None = None
        try:
            if not contract.patient:
                way = preflight.find_way(contract, report)
            if contract.forks:
                with progress.of_imports(console.say_at_once, "importing torch"):
                    zygote.warm(own.threads)
            ranks = Ranks(lock_fd=folder.lock_fd, fork=contract.forks)
        finally:
            signals.listen()
            console.start()
        for line in filter(None, (*options.accepted(asked), told(contract, own))):
            journal.say(line)
        if contract.deadline is not None:
            deadline.watch(
                contract.deadline, started=state.started, grace_s=contract.grace_s, ask=signals.stop, say=console.say
            )
        os.environ.pop(names.PROMETHEUS_MULTIPROC_DIR, None)  # prometheus_client would put our own series into files
        from ddprun.bringup import bring_up

        way = way or preflight.find_way(contract, report)
        return bring_up(contract, way, own, folder, ranks, signals, journal, console, report, losses)

    outcome = guarded(run, folder)
    if outcome.code:
        report.failed(outcome.message)
    if contract.check_only:
        console.put(1, report.table().encode())
    end(outcome)


def count(kind: str) -> int:
    """How many ranks 'gpu' and 'cpu' mean here."""
    return machine.gpus() if kind == "gpu" else machine.usable_cores()


def guarded(run: Callable[[], Outcome], folder: NodeDir) -> Outcome:
    """The outcome of ``run``, also when it ends in an error; a fault of ours leaves its traceback in a file."""
    try:
        return run()
    except NodeError as error:
        return error.outcome
    except Exception as error:
        crash = folder.path / CRASH_LOG
        with contextlib.suppress(OSError):
            crash.write_text(traceback.format_exc())
        what = (str(error).splitlines() or [""])[0]
        message = f"a fault of ddprun: {type(error).__name__}: {what} (traceback in {crash})"
        return refused(Exit.SOFTWARE, "internal", message).outcome
