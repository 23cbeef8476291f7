"""Puts the parts of a node together and runs them. Here, behind main, torch is imported."""

import contextlib
import ctypes
import os
import platform
import signal
import sys
from importlib import metadata
from pathlib import Path

from prometheus_client import CollectorRegistry

from ddprun import exporter, hostseries, preflight
from ddprun.contract import Contract
from ddprun.journal import Journal
from ddprun.logs import Console, RankLogs
from ddprun.memory import Memory
from ddprun.preflight import Way
from ddprun.pulse import Pulse
from ddprun.ranks import Ranks
from ddprun.report import Report
from ddprun.share import Share
from ddprun.signals import Signals
from ddprun.stop import Stop
from ddpwire import catalogue
from ddpwire.folder import METRICS
from ddpwire.outcome import Outcome
from ddpwire.version import __version__

DRAIN_S = 5.0
ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 (asked for, not chosen)


def bring_up(
    contract: Contract,
    way: Way,
    share: Share,
    node_dir: Path,
    ranks: Ranks,
    signals: Signals,
    journal: Journal,
    console: Console,
    report: Report,
) -> Outcome:
    """Meet the other nodes, run the ranks to their end, and say how they ended. Raises NodeError."""
    environ = dict(os.environ)  # the ranks' base: what ddprun sets for itself is not theirs
    hush_torch()

    preflight.check_limits(contract, report)

    from ddprun.agent import Node, NodeAgent
    from ddprun.agreement import Agreement
    from ddprun.checks import Checks
    from ddprun.environment import Surroundings
    from ddprun.rendezvous import FixedRankRendezvous

    series = expose(contract, node_dir, journal, way.own)
    stop = Stop(ranks, node=contract.node_rank, grace_s=contract.grace_s, say=journal.say)
    route(signals, stop, series, journal)
    series.state("rendezvous")
    journal.update(state="rendezvous")
    checks = Checks(contract, report, series, environ)
    report.begin("reach" if contract.node_rank else "")
    rendezvous = FixedRankRendezvous(contract, way, checks, say=journal.say, check_stop=stop.check)
    checks.reached(rendezvous.master)
    journal.update(master=rendezvous.master)
    if contract.check_only:
        rendezvous.next_rendezvous()
        checks.leave(rendezvous.control)
        return Outcome(code=0, cause="ok", message="the preflight found nothing that stops a run")
    pulse = Pulse(node_dir, contract.node_rank)
    agreement = Agreement(
        rendezvous.control,
        node=contract.node_rank,
        max_nodes=contract.max_nodes,
        max_restarts=contract.max_restarts,
        hang_timeout_s=contract.hang_timeout_s,
        look=pulse.look,
    )
    agreement.start()
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
    )
    agent = NodeAgent(node, rendezvous, agreement)
    try:
        agent.run()
    finally:
        logs.end_attempt()
    assert agent.outcome is not None, "elastic's loop ends after a verdict only"  # noqa: S101
    logs.drain(DRAIN_S)
    series.state("failed" if agent.outcome.code else "succeeded")
    agreement.wait_until_all_gone(contract.grace_s + DRAIN_S)
    return agent.outcome


def expose(contract: Contract, node_dir: Path, journal: Journal, own: str) -> exporter.NodeSeries:
    """Put the node's series on the net; where nothing can be bound, the run goes on without."""
    registry = CollectorRegistry()
    series = exporter.NodeSeries(registry)
    for collector in (exporter.RankSeries(node_dir / METRICS), *hostseries.collectors()):
        registry.register(collector)
    versions = {"torch_version": metadata.version("torch"), "python_version": platform.python_version()}
    series.info(catalogue.BUILD_INFO, version=__version__, **versions)
    series.info(catalogue.RUN_INFO, run_id=contract.run_id)
    series.set(catalogue.JOB_START, journal.state.started)
    host = contract.metrics_host or own
    try:
        port = exporter.serve(registry, host, contract.metrics_port)
    except OSError as error:
        journal.say(f"no metrics: {host} cannot be bound: {error.strerror}")
        return series
    if contract.metrics_port not in (0, port):
        journal.say(f"port {contract.metrics_port} is taken: the metrics are on {port} instead")
    url = f"http://{own if host in ANYWHERE else host}:{port}/metrics"
    journal.say(f"metrics at {url}")
    journal.update(metrics=url)
    return series


def route(signals: Signals, stop: Stop, series: exporter.NodeSeries, journal: Journal) -> None:
    """From now on signals are the ranks' matter."""

    def on_stop(number: int) -> None:
        series.count(catalogue.TERMINATION_SIGNALS, signal=signal.Signals(number).name)
        journal.update(state="stopping")
        stop.request(number)

    def on_pass(number: int) -> None:
        series.count(catalogue.TERMINATION_SIGNALS, signal=signal.Signals(number).name)
        stop.pass_on(number)

    signals.on_stop, signals.on_pass = on_stop, on_pass


def hush_torch() -> None:
    """Let torch's C++ say nothing here: a store that is waited for or gone is news that we tell in a sentence."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    if module := sys.modules.get("torch"):  # it has read the variable before, for the ranks
        library = Path(str(module.__file__)).parent / "lib" / "libc10.so"
        with contextlib.suppress(OSError, AttributeError):  # another build: then there are lines too many
            ctypes.CDLL(str(library))._ZN3c1011initLoggingEv()  # c10::initLogging(), which reads the variable
