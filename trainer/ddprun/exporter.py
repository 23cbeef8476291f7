"""The node's one /metrics: ddprun's own series, and whatever its ranks count with prometheus_client.

A rank writes the files of prometheus_client's multiprocess mode into a folder of its own; here they are read and given
the label ``rank``, instead of the library's ``pid``. Counters of a rank that died stay in their sum; its gauges go, but
for the node's last words.
"""

import contextlib
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ddprun import hostseries
from ddprun.pulse import Pulse
from ddprun.rankfiles import ASIDE, PREFIX, READING
from ddpwire import catalogue

FRESH_S = 0.25
PATIENCE_S = 10.0  # with a scraper that sends nothing, or does not read


class RankSeries(Collector):
    """The series of all ranks that have written any."""

    def __init__(self, metrics_dir: Path) -> None:
        self._metrics_dir = metrics_dir
        self.with_last_gauges = False

    def collect(self) -> Iterator[Family]:
        """Every family once, with the samples of all ranks."""
        families: dict[str, Family] = {}
        for folder in sorted(self._metrics_dir.glob(f"{PREFIX}*")):
            for family in read_rank(folder, with_last_gauges=self.with_last_gauges):
                merged = families.setdefault(family.name, Family(family.name, family.documentation, family.type))
                if merged.type == family.type:  # two ranks that disagree about a name: the first is right
                    merged.samples += of_one_rank(family.samples, folder.name.removeprefix(PREFIX))
        yield from families.values()


def read_rank(folder: Path, *, with_last_gauges: bool = False) -> list[Family]:
    """What a rank's processes have written, summed up by the library; nothing while it cannot be read."""
    patterns = ("*.db", f"*{ASIDE}") if with_last_gauges else ("*.db",)
    try:
        with READING:
            files = [str(path) for pattern in patterns for path in folder.glob(pattern)]
            return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, RuntimeError, struct.error):
        return []  # a file that is just being made: the next scrape has it


def of_one_rank(samples: Iterable[Sample], rank: str) -> list[Sample]:
    """The samples with their rank instead of their pid; of two processes with the same gauge, the later one."""
    unique = {}
    for sample in samples:
        labels = {"rank": rank} | {key: value for key, value in sample.labels.items() if key != "pid"}
        unique[sample.name, tuple(sorted(labels.items()))] = sample._replace(labels=labels)
    return list(unique.values())


class Heartbeats(Collector):
    """When the ranks of the present attempt last gave a sign of life."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def collect(self) -> Iterator[Family]:
        """Those that have given any."""
        since_epoch = time.time() - time.monotonic()
        beats = [(str(rank), since_epoch + beat.at_s) for rank, beat in sorted(self._pulse.beats().items())]
        yield hostseries.family(catalogue.HEARTBEAT, beats)


class NodeSeries:
    """ddprun's own series, all of them there from the start; the machine's are read when somebody asks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        kinds = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}
        self._series: dict[str, Any] = {}
        for metric in catalogue.CATALOGUE:
            if metric.set_by == "ddprun" and metric not in (*hostseries.SERIES, catalogue.HEARTBEAT):
                series = kinds[metric.kind](metric.name, metric.help, tuple(metric.labels), registry=registry)
                self._series[metric.name] = series
                for label, values in metric.labels.items() if len(metric.labels) == 1 else ():
                    for value in values:
                        series.labels(**{label: value})

    def info(self, metric: catalogue.Metric, **labels: str) -> None:
        """Set a gauge that is always 1 for its labels' sake."""
        self._series[metric.name].labels(**labels).set(1)

    def set(self, metric: catalogue.Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._of(metric, labels).set(value)

    def count(self, metric: catalogue.Metric, number: int = 1, **labels: str) -> None:
        """Count one more, or ``number``."""
        self._of(metric, labels).inc(number)

    def _of(self, metric: catalogue.Metric, labels: dict[str, str]) -> Any:
        series = self._series[metric.name]
        return series.labels(**labels) if labels else series

    def state(self, state: str) -> None:
        """Say in which of the catalogue's states this node is."""
        for other in catalogue.JOB_STATES:
            self._series[catalogue.JOB_STATE.name].labels(state=other).set(other == state)


class Page:
    """What is answered. Who asks while it is made, or right after, gets the same: a hundred cost what one does."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._making = threading.Lock()
        self._body, self._made_at = b"", 0.0

    def body(self) -> bytes:
        """The page as it is now."""
        with self._making:
            if not self._body or time.monotonic() - self._made_at > FRESH_S:
                self._body, self._made_at = generate_latest(self._registry), time.monotonic()
            return self._body


def serve(registry: CollectorRegistry, host: str, port: int) -> int:
    """Answer scrapes from a thread, on ``port`` or, should it be taken, on a free one; which one. Raises OSError."""
    page = Page(registry)

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            body = page.body()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # a scraper that went away

    try:
        server = Server((host, port), Handler)
    except OSError:
        server = Server((host, 0), Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server.server_address[1]
