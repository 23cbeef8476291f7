"""Registers this node with Prometheus: writes a target file for service discovery, and pushes the outcome.

While the node runs, the target file is in the folder that DDP_TARGETS_DIR names, which a Prometheus server watches. If
the node is killed, ddpctl removes the file later. Only the outcome goes to a Pushgateway, as Prometheus advises
(https://prometheus.io/docs/practices/pushing/). prometheus_client is imported only for a push, because main.py imports
this module before the fork.
"""

import contextlib
import time
from pathlib import Path

from ddprun.files.node_dir import Node
from ddprun.settings.node_config import NodeConfig
from ddpwire import metrics
from ddpwire.run_files import MetricsTarget, Outcome, targets_file_name, targets_text, write_atomic


def register(config: NodeConfig, url: str) -> None:
    """Write the target file, if a folder is configured. Raises OSError."""
    if path := _target_file(config):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = MetricsTarget(
            url=url, job_id=config.run_id, node=config.node_rank, launcher=config.launcher, slurm_job=config.slurm_job
        )
        write_atomic(path, targets_text([target]).encode())
        path.chmod(0o644)  # Prometheus runs as another user


def deregister(config: NodeConfig) -> None:
    """Remove the target file."""
    if path := _target_file(config):
        with contextlib.suppress(OSError):
            path.unlink()


def _target_file(config: NodeConfig) -> Path | None:
    folder = config.targets_dir
    return None if folder is None else folder / targets_file_name(config.run_id, config.node_rank)


def push_outcome(node: Node, outcome: Outcome, user: str) -> None:
    """On node 0, push the outcome to the Pushgateway, if one is configured. If this fails, only log the failure.

    The Pushgateway keeps one group of series for each user and run name, until the group is deleted there.
    """
    config, state = node.config, node.journal.state
    if not config.pushgateway or config.node_rank:
        return
    from prometheus_client import CollectorRegistry, Gauge, push_to_gateway

    registry, now = CollectorRegistry(), time.time()
    values = ((metrics.ENDED, now), (metrics.ENDED_CODE, outcome.code), (metrics.ENDED_SECONDS, now - state.started))
    for metric, value in values:
        Gauge(metric.name, metric.help, registry=registry).set(value)
    info = Gauge(metrics.ENDED_INFO.name, metrics.ENDED_INFO.help, tuple(metrics.ENDED_INFO.labels), registry=registry)
    info.labels(cause=outcome.cause, run_uid=state.run_uid).set(1)
    key = {"run": config.run_id} | ({"user": user} if user else {})
    try:
        push_to_gateway(config.pushgateway, "ddpctl", registry, grouping_key=key, timeout=5.0)
    except OSError as error:  # includes urllib's errors
        node.console.log(f"the outcome was not sent to the Pushgateway {config.pushgateway}: {error}")
