"""Tells a Pushgateway how a run ended: one group of series a run, which stays there until somebody deletes it.

For the outcome alone, as Prometheus advises (https://prometheus.io/docs/practices/pushing/): what a run says while it
lives is scraped from its nodes.
"""

import time
from collections.abc import Callable

from ddprun.contract import Contract
from ddpwire import catalogue
from ddpwire.outcome import Outcome

TIMEOUT_S = 5.0
JOB = "ddpctl"


def push(contract: Contract, outcome: Outcome, *, started: float, say: Callable[[str], None]) -> None:
    """Node 0 tells it, where that was asked for; what fails is one line, and changes no exit code."""
    if not contract.pushgateway or contract.node_rank:
        return
    from prometheus_client import CollectorRegistry, Gauge, push_to_gateway

    registry, now = CollectorRegistry(), time.time()
    values = (
        (catalogue.ENDED, now),
        (catalogue.ENDED_CODE, outcome.code),
        (catalogue.ENDED_SECONDS, now - started),
    )
    for metric, value in values:
        Gauge(metric.name, metric.help, registry=registry).set(value)
    info = catalogue.ENDED_INFO
    Gauge(info.name, info.help, tuple(info.labels), registry=registry).labels(cause=outcome.cause).set(1)
    try:
        push_to_gateway(
            contract.pushgateway, job=JOB, registry=registry, grouping_key={"run": contract.run_id}, timeout=TIMEOUT_S
        )
    except OSError as error:  # urllib's errors are
        say(f"the Pushgateway {contract.pushgateway} was not told how the run ended: {error}")
