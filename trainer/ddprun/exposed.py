"""What of a node can be scraped: which series there are, where they are served, and the last words that are kept.

A port that is taken, or an address that cannot be bound, stops no training.
"""

import contextlib
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from ddprun import exporter, hostseries, registration, versions
from ddprun.contract import Contract
from ddprun.history import History
from ddprun.journal import Journal
from ddprun.pulse import Pulse
from ddpwire import catalogue, names
from ddpwire.folder import METRICS, SNAPSHOT, write_atomic
from ddpwire.version import __version__

ANYWHERE = ("0.0.0.0", "::")  # noqa: S104 (asked for, not chosen)


class Exposed:
    """The series of a node and of its ranks."""

    def __init__(
        self, contract: Contract, node_dir: Path, journal: Journal, pulse: Pulse, environ: Mapping[str, str]
    ) -> None:
        self._journal = journal
        self._registry = CollectorRegistry()
        self.series = exporter.NodeSeries(self._registry)
        self._ranks = exporter.RankSeries(node_dir / METRICS)
        for collector in (self._ranks, exporter.Heartbeats(pulse), *hostseries.collectors()):
            self._registry.register(collector)
        self.series.info(
            catalogue.BUILD_INFO,
            version=__version__,
            torch_version=metadata.version("torch"),
            python_version=platform.python_version(),
            image_digest=versions.image_digest(environ.get(names.IMAGE, "")),
        )
        config = versions.config_sha256(contract.command)
        self.series.info(catalogue.RUN_INFO, run_id=contract.run_id, config_sha256=config)
        self.series.set(catalogue.JOB_START, journal.state.started)
        self.series.set(catalogue.WORLD_SIZE_EXPECTED, contract.max_nodes * contract.nproc)
        self.history = History(node_dir, self._registry)

    def serve(self, contract: Contract, own: str) -> None:
        """Put them on the net, at the address that was asked for or the node's ``own``, and say where."""
        host, say = contract.metrics_host or own, self._journal.say
        try:
            port = exporter.serve(self._registry, host, contract.metrics_port)
        except OSError as error:
            say(f"no metrics: {host} cannot be bound: {error.strerror}")
            return
        if contract.metrics_port not in (0, port):
            say(f"port {contract.metrics_port} is taken: the metrics are on {port} instead")
        url = f"http://{own if host in ANYWHERE else host}:{port}/metrics"
        say(f"metrics at {url}")
        self._journal.update(metrics=url)
        try:
            registration.register(contract, url)
        except OSError as error:
            say(f"Prometheus is not told where the metrics are: {error.filename}: {error.strerror}")

    def keep(self, node_dir: Path) -> None:
        """Write down what they say last, the ranks' gauges included, for who came too late to scrape them."""
        self._ranks.with_last_gauges = True
        self.history.keep()
        with contextlib.suppress(OSError):
            write_atomic(node_dir / SNAPSHOT, generate_latest(self._registry))
