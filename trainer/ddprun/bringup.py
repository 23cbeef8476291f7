"""Connect a node to the other nodes, run its ranks until they end, and return the outcome.

main.py imports this module after it has forked the supervisor. Therefore this module and its imports may use
prometheus_client, torch and threads.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from ddprank.torch_log import CPP_LOG_LEVEL, set_cpp_log_level
from ddprun.files.node_dir import newest_checkpoint
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import metrics
from ddprun.metrics.metrics import NodeMetrics
from ddprun.metrics.recovery import Downtime
from ddprun.nodes import preflight
from ddprun.nodes.preflight import StartedNode
from ddprun.output.logs import RankLogs
from ddprun.output.progress import Progress
from ddprun.ranks.termination import OomMonitor, Stop
from ddprun.settings import node_facts
from ddprun.settings.node_config import NodeConfig
from ddprun.system import compat
from ddpwire import metrics as ddpwire_metrics
from ddpwire.run_files import Outcome

if TYPE_CHECKING:
    from ddprun.nodes.election import Voter

DRAIN_S = 5.0  # for the last output of the ranks, and for the other nodes to read the decision


def bring_up(node: StartedNode, take_place: Callable[[NodeConfig], None]) -> Outcome:
    """Connect to the other nodes, run the ranks until they end, and return the outcome. Raises NodeError.

    A spare first waits for a place, and then calls ``take_place`` with its settings as a node.
    """
    config, folder, journal, workers, report = node.config, node.folder, node.journal, node.workers, node.report
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
        node, voter = stand_by(node)
        config = node.config
        take_place(config)
        node = replace(node, downtime=Downtime(began_at=time.monotonic()))
        journal.emit("took_place", machine=config.machine, epoch=voter.electorate.epoch)
    heartbeats = HeartbeatMonitor(folder.runtime, config.node_rank)
    node_metrics = NodeMetrics(node, heartbeats, node.environ)
    series = node_metrics.series
    node_metrics.serve(node.route.own)
    stop = Stop(workers, config, journal.log)
    route_signals(node, stop, series)
    series.state("rendezvous")
    journal.update(state="rendezvous")
    journal.emit("preflight_done", seconds=time.time() - journal.state.started)
    checks = PeerChecks(node, series)
    report.begin("reach" if config.node_rank else "")
    rendezvous = FixedRankRendezvous(node, checks, stop.check, voter)
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

    node.signals.on_resize = on_resize
    context = NodeContext(
        **vars(node),
        stop=stop,
        logs=logs,
        series=series,
        rank_series=node_metrics.rank_series,
        heartbeats=heartbeats,
        oom_monitor=OomMonitor(),
    )
    agent = NodeAgent(context, rendezvous)
    report_missing_checkpoint(config, journal.log, is_first=not (folder.previous_run or voter))
    node_facts.write_inventory(folder.path, config, node.environ)
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
    if agent.copies:
        agent.copies.finish(succeeded=agent.outcome.code == 0)
    agent.consensus.wait_until_all_gone(config.grace_s + DRAIN_S)
    return agent.outcome


def stand_by(node: StartedNode) -> tuple[StartedNode, "Voter"]:
    """Wait until this spare takes the place of a node, and return that node. Raises NodeError."""
    from ddprun.nodes.peer_checks import PeerChecks
    from ddprun.nodes.spares import Spare

    series, stop = metrics.NodeSeries(CollectorRegistry()), Stop(node.workers, node.config, node.journal.log)
    route_signals(node, stop, series)
    node.journal.update(state="spare")
    return Spare(node, stop.check).wait(PeerChecks(node, series))


def report_missing_checkpoint(config: NodeConfig, log: Callable[[str], None], *, is_first: bool) -> None:
    """Log a line on node 0 if this run resumes another run, whose folder of checkpoints is empty or missing.

    ``is_first``: whether this is the first start of the run.
    """
    if is_first and not config.node_rank and config.resumes and config.checkpoint_dir:
        with contextlib.suppress(OSError):
            if not newest_checkpoint(Path(config.checkpoint_dir)):
                reason = f"run '{config.resumes}' has no checkpoint in {config.checkpoint_dir}"
                log(f"{reason}: the training starts at step 0, unless the script keeps checkpoints elsewhere")


def route_signals(node: StartedNode, stop: Stop, series: metrics.NodeSeries) -> None:
    """From now on, when ddprun receives a signal, forward it to the ranks."""
    config, journal, signals = node.config, node.journal, node.signals

    def record(number: int, sent: int = 0, reason: str = "") -> None:
        name = signal.Signals(number).name
        if not reason:  # else no signal has reached ddprun
            series.count(ddpwire_metrics.TERMINATION_SIGNALS, signal=name)
        facts: dict[str, Any] = {"reason": reason} if reason else {"signal": name}
        facts |= {"sent": signal.Signals(sent).name} if sent else {}
        journal.emit("signal", **facts)

    def on_stop(number: int) -> None:
        series.state("stopping")
        journal.update(state="stopping")
        if stop.requested:
            record(number)
        else:
            record(number, stop.sent_for(number), signals.stop_reason)
        stop.reason = signals.stop_reason
        stop.request(number, leaves=config.is_replaced and number == signal.SIGTERM and not stop.reason)

    def on_forward(number: int) -> None:
        record(number, number)
        stop.forward(number)

    signals.on_stop, signals.on_forward = on_stop, on_forward
