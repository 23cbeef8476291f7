"""Puts the parts of a node together and runs them. Here, behind main, torch is imported."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from ddprun import exporter, inventory, preflight, progress
from ddprun.contract import Contract
from ddprun.exposed import Exposed
from ddprun.journal import Journal
from ddprun.logs import Console, RankLogs
from ddprun.losses import Losses
from ddprun.memory import Memory
from ddprun.nodedir import NodeDir
from ddprun.preflight import Way
from ddprun.pulse import Pulse
from ddprun.ranks import Ranks
from ddprun.report import Report
from ddprun.share import Share
from ddprun.signals import Signals
from ddprun.stop import Stop
from ddpwire import catalogue
from ddpwire.outcome import Outcome

DRAIN_S = 5.0


def bring_up(
    contract: Contract,
    way: Way,
    share: Share,
    folder: NodeDir,
    ranks: Ranks,
    signals: Signals,
    journal: Journal,
    console: Console,
    report: Report,
    losses: Losses,
) -> Outcome:
    """Meet the other nodes, run the ranks to their end, and say how they ended. Raises NodeError."""
    environ = dict(os.environ)  # the ranks' base: what ddprun sets for itself is not theirs
    node_dir = folder.path
    hush_torch()

    preflight.check_limits(contract, report)

    with progress.of_imports(journal.say, "importing torch elastic" if contract.forks else "importing torch"):
        from ddprun.agent import NodeAgent
        from ddprun.agreement import Agreement
        from ddprun.checks import Checks
        from ddprun.environment import Surroundings
        from ddprun.node import Node
        from ddprun.rendezvous import FixedRankRendezvous

    pulse = Pulse(node_dir, contract.node_rank)
    exposed = Exposed(contract, node_dir, journal, pulse, environ)
    series = exposed.series
    exposed.serve(contract, way.own)
    stop = Stop(ranks, node=contract.node_rank, grace_s=contract.grace_s, say=journal.say)
    route(signals, stop, series, journal)
    series.state("rendezvous")
    journal.update(state="rendezvous")
    journal.tell("preflight_done", seconds=time.time() - journal.state.started)
    checks = Checks(contract, report, series, environ)
    report.begin("reach" if contract.node_rank else "")
    rendezvous = FixedRankRendezvous(contract, way, checks, say=journal.say, check_stop=stop.check)
    checks.reached(rendezvous.master)
    journal.update(master=rendezvous.master)
    if contract.check_only:
        rendezvous.next_rendezvous()
        checks.leave(rendezvous.control)
        return Outcome(code=0, cause="ok", message="the preflight found nothing that stops a run")
    agreement = Agreement(
        rendezvous.control,
        node=contract.node_rank,
        max_nodes=contract.max_nodes,
        max_restarts=contract.max_restarts,
        hang_timeout_s=contract.hang_timeout_s,
        look=pulse.look,
    )
    agreement.start()
    inventory.keep(node_dir, contract, environ)
    exposed.history.start()
    logs = RankLogs(console, contract.node_rank)
    around = Surroundings(
        run_id=contract.run_id,
        run_dir=contract.run_dir,
        checkpoint_dir=contract.checkpoint_dir,
        max_restarts=contract.max_restarts,
        share=share,
        interface=way.interface,
    )
    node = Node(
        contract=contract,
        node_dir=node_dir,
        environ=environ,
        around=around,
        ranks=ranks,
        stop=stop,
        logs=logs,
        journal=journal,
        series=series,
        pulse=pulse,
        memory=Memory(),
        losses=losses,
        step_before=folder.before.step if folder.before else None,
    )
    agent = NodeAgent(node, rendezvous, agreement)
    try:
        agent.run()
    finally:
        logs.end_attempt()
    assert agent.outcome is not None, "elastic's loop ends after a verdict only"  # noqa: S101
    logs.drain(DRAIN_S)
    series.state("failed" if agent.outcome.code else "succeeded")
    exposed.keep(node_dir)
    agreement.wait_until_all_gone(contract.grace_s + DRAIN_S)
    return agent.outcome


def route(signals: Signals, stop: Stop, series: exporter.NodeSeries, journal: Journal) -> None:
    """From now on signals are the ranks' matter."""

    def on_stop(number: int) -> None:
        series.count(catalogue.TERMINATION_SIGNALS, signal=signal.Signals(number).name)
        series.state("stopping")
        journal.update(state="stopping")
        journal.tell("signal", signal=signal.Signals(number).name)
        stop.request(number)

    def on_pass(number: int) -> None:
        series.count(catalogue.TERMINATION_SIGNALS, signal=signal.Signals(number).name)
        journal.tell("signal", signal=signal.Signals(number).name)
        stop.pass_on(number)

    signals.on_stop, signals.on_pass = on_stop, on_pass


def hush_torch() -> None:
    """Let torch's C++ say nothing here: a store that is waited for or gone is news that we tell in a sentence."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    if module := sys.modules.get("torch"):  # it has read the variable before, for the ranks
        library = Path(str(module.__file__)).parent / "lib" / "libc10.so"
        with contextlib.suppress(OSError, AttributeError):  # another build: then there are lines too many
            ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()  # c10::initLogging(), which reads the variable
