"""Connect a node to the other nodes, run its ranks until they end, and return the outcome.

main.py imports this module after it has forked the supervisor. Therefore this module and its imports may use
prometheus_client, torch and threads.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from ddprank.torch_log import CPP_LOG_LEVEL, set_cpp_log_level
from ddprun.files.node_dir import Journal, Node
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import metrics
from ddprun.metrics.metrics import NodeMetrics
from ddprun.metrics.recovery import Downtime
from ddprun.nodes import preflight
from ddprun.nodes.preflight import PreflightReport, Route
from ddprun.output.logs import RankLogs
from ddprun.output.progress import Progress
from ddprun.ranks.node_commands import NodeCommands
from ddprun.ranks.notices import Notices
from ddprun.ranks.rank_environment import ResourceAllocation
from ddprun.ranks.termination import OomMonitor, Signals, Stop
from ddprun.ranks.workers import Workers
from ddprun.settings import node_facts
from ddprun.settings.node_config import NodeConfig
from ddprun.settings.requeue import newest_checkpoint
from ddprun.system import compat
from ddpwire import metrics as ddpwire_metrics
from ddpwire.run_files import Outcome

if TYPE_CHECKING:
    from ddprun.agent import NodeAgent, NodeContext
    from ddprun.nodes.election import Voter
    from ddprun.nodes.rendezvous import FixedRankRendezvous

DRAIN_S = 5.0
TakePlace = Callable[[NodeConfig], tuple[Node, NodeCommands]]


def bring_up(
    node: Node, route: Route, resources: ResourceAllocation, workers: Workers, signals: Signals,
    report: PreflightReport, downtime: Downtime, commands: NodeCommands, take_place: TakePlace, notices: Notices,
) -> Outcome:  # fmt: skip
    """Connect to the other nodes, run the ranks until they end, and return the outcome. Raises NodeError.

    A spare first waits for a place, and then calls ``take_place`` with its settings as a node.
    """
    config, folder, journal = node.config, node.folder, node.journal
    environ = dict(os.environ)  # for the ranks: a copy, because ddprun changes its own environment below
    # Turn off torch's C++ log in this process, because ddprun itself reports problems with a store.
    if module := sys.modules.get("torch"):  # already imported for the ranks: a change of the variable has no effect
        set_cpp_log_level("FATAL", str(module.__file__))
    else:
        os.environ[CPP_LOG_LEVEL] = "FATAL"

    preflight.check_limits(config, report)

    with Progress(journal.log, "importing torch elastic" if config.forks else "importing torch"):
        compat.check_torch()
        from ddprun.agent import NodeAgent, NodeContext
        from ddprun.nodes.peer_checks import PeerChecks
        from ddprun.nodes.rendezvous import FixedRankRendezvous

    voter = None
    if config.is_spare:
        config, route, voter = stand_by(node, route, workers, signals, report, environ)
        node, commands = take_place(config)
        downtime = Downtime(began_at=time.monotonic())
        journal.emit("took_place", machine=config.machine, epoch=voter.electorate.epoch)
    heartbeats = HeartbeatMonitor(folder.runtime, config.node_rank)
    node_metrics = NodeMetrics(node, heartbeats, environ)
    series = node_metrics.series
    node_metrics.serve(route.own)
    stop = Stop(workers, config, journal.log)
    route_signals(config, signals, stop, series, journal)
    series.state("rendezvous")
    journal.update(state="rendezvous")
    journal.emit("preflight_done", seconds=time.time() - journal.state.started)
    checks = PeerChecks(config, report, series, environ)
    report.begin("reach" if config.node_rank else "")
    rendezvous = FixedRankRendezvous(config, route, checks, log=journal.log, check_stop=stop.check, voter=voter)
    if config.node_rank:
        report.done(f"{rendezvous.master} answers")
    journal.update(master=rendezvous.master)
    if config.check_only:
        rendezvous.next_rendezvous()
        checks.leave(rendezvous.control)
        return Outcome(code=0, cause="ok", message="the preflight found nothing that stops a run")
    logs = RankLogs(node.console, config, node.files)

    def on_resize() -> None:
        logs.resize()
        workers.signal(signal.SIGWINCH)  # the size of the terminal has changed

    signals.on_resize = on_resize
    context = NodeContext(
        **{field.name: getattr(node, field.name) for field in fields(Node)},
        environ=environ,
        resources=resources,
        interface=route.interface,
        workers=workers,
        commands=commands,
        notices=notices,
        stop=stop,
        logs=logs,
        series=series,
        heartbeats=heartbeats,
        oom_monitor=OomMonitor(),
        downtime=downtime,
    )
    agent = NodeAgent(context, rendezvous)
    is_new = voter is not None and not config.node_rank  # an elected node 0
    finish_copies = keep_copies(agent, context, rendezvous, route.own, is_new=is_new)
    report_missing_checkpoint(config, journal.log, is_first=not (folder.previous_run or voter))
    node_facts.write_inventory(folder.path, config, environ)
    node_metrics.start()
    try:
        agent.run()
    finally:
        logs.end_attempt()
        node_metrics.write_summary()
    assert agent.outcome is not None, "elastic's loop ends only after a decision"  # noqa: S101
    logs.drain(DRAIN_S)
    logs.show_last_lines(agent.outcome, folder.path)
    failed_or_stopped = "stopped" if agent.outcome.cause == "stopped" else "failed"
    series.state(failed_or_stopped if agent.outcome.code else "succeeded")
    node_metrics.write_snapshot()
    finish_copies(agent.outcome.code == 0)
    agent.consensus.wait_until_all_gone(config.grace_s + DRAIN_S)
    return agent.outcome


def keep_copies(
    agent: "NodeAgent", node: "NodeContext", rendezvous: "FixedRankRendezvous", own: str, *, is_new: bool
) -> Callable[[bool], None]:
    """Copy checkpoints from node 0 to other nodes, if the job wants it. Raises NodeError.

    ``own``: the address of this node. Return a function that waits for the last copy, after the ranks have ended.
    """
    if not (node.config.checkpoint_dir or node.config.checkpoint_copies > 1):
        return lambda _: None
    from ddprun.files.checkpoint_copies import CheckpointCopies, start_copies

    def begin(offers_at: str = "") -> CheckpointCopies | None:
        where = (rendezvous.address, rendezvous.control, lambda: rendezvous.members, node.journal, node.folder.path)
        return start_copies(node.config, *where, offers_at=offers_at, is_new=is_new)

    copies = begin()

    def begin_again() -> None:
        nonlocal copies
        if copies:
            copies.close()
        copies = begin(own)

    def fill(attempt: int) -> None:
        if copies:
            if is_new and not agent.outcome:
                copies.restore()
            copies.fill(attempt, lambda: bool(node.stop.requested or agent.consensus.decision))

    agent.on_new_store, agent.before_ranks = begin_again, fill
    return lambda succeeded: copies.finish(succeeded=succeeded) if copies else None


def stand_by(
    node: Node, route: Route, workers: Workers, signals: Signals, report: PreflightReport, environ: Mapping[str, str]
) -> tuple[NodeConfig, Route, "Voter"]:
    """Wait until this spare takes the place of a node. Return its new settings and route. Raises NodeError."""
    from ddprun.nodes.peer_checks import PeerChecks
    from ddprun.nodes.spares import Spare

    config, journal = node.config, node.journal
    stop, series = Stop(workers, config, journal.log), metrics.NodeSeries(CollectorRegistry())
    route_signals(config, signals, stop, series, journal)
    journal.update(state="spare")
    spare = Spare(config, route, log=journal.log, check_stop=stop.check)
    return spare.wait(PeerChecks(config, report, series, environ))


def report_missing_checkpoint(config: NodeConfig, log: Callable[[str], None], *, is_first: bool) -> None:
    """Log a line on node 0 if this run resumes another run, whose folder of checkpoints is empty or missing.

    ``is_first``: whether this is the first start of the run.
    """
    if is_first and not config.node_rank and config.resumes and config.checkpoint_dir:
        with contextlib.suppress(OSError):
            if not newest_checkpoint(Path(config.checkpoint_dir)):
                what = f"run '{config.resumes}' has no checkpoint in {config.checkpoint_dir}"
                log(f"{what}: the training starts at step 0, unless the script keeps checkpoints elsewhere")


def route_signals(
    config: NodeConfig, signals: Signals, stop: Stop, series: metrics.NodeSeries, journal: Journal
) -> None:
    """From now on, when ddprun receives a signal, forward it to the ranks."""

    def record(number: int) -> None:
        series.count(ddpwire_metrics.TERMINATION_SIGNALS, signal=signal.Signals(number).name)
        journal.emit("signal", signal=signal.Signals(number).name)

    def on_stop(number: int) -> None:
        series.state("stopping")
        journal.update(state="stopping")
        record(number)
        stop.reason = signals.stop_reason
        stop.request(number, leaves=config.is_replaced and number == signal.SIGTERM and not stop.reason)

    def on_forward(number: int) -> None:
        record(number)
        stop.forward(number)

    signals.on_stop, signals.on_forward = on_stop, on_forward
