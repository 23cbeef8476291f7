"""The metrics of a node and its ranks: the endpoint /metrics, the file history.csv and the final snapshot metrics.prom.

A rank writes the files of prometheus_client's multiprocess mode into its own folder. This module reads them and
replaces the library's label ``pid`` with ``rank``. Gauges describe the present, so the gauges of a process that has
ended appear only in the snapshot.
"""

import contextlib
import platform
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ddprank.heartbeat import Beat
from ddprun.files import run_identity
from ddprun.files.node_dir import Node, encode_summary
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import host_metrics, registration
from ddprun.settings import node_facts
from ddprun.system import compat, network
from ddprun.system.file_writer import FileWriter, append, replace_file
from ddpwire import metrics, names
from ddpwire.events import MOST_BYTES, Event, read_last_events
from ddpwire.history import HEADER, HISTORY, MAX_ROWS, fold, line
from ddpwire.run_files import METRICS, SNAPSHOT, SUMMARY, rank_metrics
from ddpwire.version import __version__

RANK_PREFIX = "rank-"
KEPT_KINDS = ("counter", "histogram", "summary")
# What prometheus_client raises for damaged files. Scripts may write into the folder, and must not end the run by that.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, MemoryError, struct.error)
ROW_INTERVAL_S = 1.0  # doubled whenever the rows are thinned
IDLE_RATIO = 50  # the pause is at least this many times as long as collecting a row takes


def prepare_rank_dir(folder: Path) -> None:
    """Delete the last gauges of the previous process of a rank that is about to start."""
    for path in folder.glob("gauge_*.db"):
        if _has_ended(path):
            path.unlink(missing_ok=True)


def _has_ended(path: Path) -> bool:
    """Return whether the process that has written a file of prometheus_client has ended."""
    pid = path.stem.rpartition("_")[2]
    return pid.isdecimal() and not psutil.pid_exists(int(pid))


def _is_sound(path: Path) -> bool:
    """Return whether a file of prometheus_client can be read. Its first 4 bytes are the number of used bytes."""
    try:
        used = int.from_bytes(path.read_bytes()[:4], sys.byteorder, signed=True)
        compat.merge_files([str(path)])
    except UNREADABLE:
        return False
    return 8 <= used <= path.stat().st_size


def add_up(families: Iterable[Family]) -> list[Family]:
    """Return each family once, with the values of equal series added up. The first family determines the type."""
    sums: dict[str, Family] = {}
    for family in families:
        total = sums.setdefault(family.name, Family(family.name, family.documentation, family.type))
        total.samples += family.samples if family.type == total.type else []
    for total in sums.values():
        values: dict[tuple[Any, ...], float] = {}
        for sample in total.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            values[series] = values.get(series, 0.0) + sample.value
        total.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
    return list(sums.values())


class RankSeries(Collector):
    """Collects the series that the ranks have written, and the times of the last heartbeats of the running ranks.

    What ended processes have counted is kept in memory, and their files are deleted. So restarts, and data loader
    workers, which leave files in each epoch, do not make scrapes slower.
    """

    def __init__(
        self,
        metrics_dir: Callable[[], Path],
        pids: Callable[[], Mapping[str, str]],
        running_beats: Callable[[], Mapping[int, Beat]] = dict,
    ) -> None:
        """``pids``: the process of each rank. ``running_beats``: the heartbeats of the ranks that have sent one."""
        self._metrics_dir, self._pids, self._running_beats = metrics_dir, pids, running_beats
        self._ended: dict[str, list[Family]] = {}  # by rank, what processes have counted whose files are deleted
        self._lock = threading.RLock()  # held while files are read or deleted
        self.with_last_gauges = False

    def collect(self) -> Iterator[Family]:
        """Yield each family once, with the samples of all ranks."""
        pids, families = self._pids(), []
        for rank in self._ranks():
            for family in self.read(rank):
                family.samples = label_rank(family.samples, rank, pids.get(rank, ""))
                families.append(family)
        yield from add_up(families)
        since_epoch = time.time() - time.monotonic()
        times = [(str(rank), since_epoch + beat.at_s) for rank, beat in sorted(self._running_beats().items())]
        yield host_metrics.family(metrics.HEARTBEAT, times)

    def _ranks(self) -> list[str]:
        folders = self._metrics_dir().glob(f"{RANK_PREFIX}*")
        return sorted(self._ended.keys() | {folder.name.removeprefix(RANK_PREFIX) for folder in folders})

    def read(self, rank: str) -> list[Family]:
        """Return the series of a rank's processes. Those of files that cannot be read are missing."""
        folder = self._metrics_dir() / f"{RANK_PREFIX}{rank}"
        with self._lock:
            gauges = [path for path in folder.glob("gauge_*.db") if self.with_last_gauges or not _has_ended(path)]
            files = [*gauges, *(path for kind in KEPT_KINDS for path in folder.glob(f"{kind}_*.db"))]
            families: list[Family] = []
            with contextlib.suppress(*UNREADABLE):
                try:
                    families = compat.merge_files(map(str, files))
                except UNREADABLE:  # a file is damaged, or is being created
                    families = compat.merge_files(map(str, filter(_is_sound, files)))
            return add_up([*self._ended.get(rank, ()), *families])

    def keep_counts(self) -> None:
        """Add up what ended processes have counted, and delete their files. Rename damaged files."""
        folders = f"{RANK_PREFIX}*"
        paths = [path for kind in KEPT_KINDS for path in self._metrics_dir().glob(f"{folders}/{kind}_*.db")]
        for path in filter(_has_ended, paths):
            rank = path.parent.name.removeprefix(RANK_PREFIX)
            with contextlib.suppress(*UNREADABLE), self._lock:  # another thread or process has deleted it
                if not _is_sound(path):
                    path.rename(path.with_suffix(".bad"))
                    continue
                families = compat.merge_files([str(path)])
                path.unlink()
                self._ended[rank] = add_up([*self._ended.get(rank, ()), *families])

    def counts(self) -> dict[str, Any]:
        """Return what each rank has counted, as JSON: its families with their samples."""
        return {
            rank: [
                [family.name, family.documentation, family.type, [sample[:3] for sample in family.samples]]
                for family in self.read(rank)
                if family.type in KEPT_KINDS
            ]
            for rank in self._ranks()
        }

    def spent_s(self, rank: str) -> str:
        """Return the seconds that a rank's processes have counted so far, in the format of names.SPENT_BEFORE."""
        wanted = (metrics.PRODUCTIVE.name, metrics.UNPRODUCTIVE.name)
        samples = (sample for family in self.read(rank) for sample in family.samples if sample.name in wanted)
        return ",".join(f"{sample.labels.get('cause', 'productive')}={sample.value:.3f}" for sample in samples)

    def restore(self, counts: Mapping[str, Any]) -> None:
        """Replace what is kept of ended processes by what ``counts`` has returned."""
        for rank, families in counts.items():
            kept = []
            with contextlib.suppress(*UNREADABLE):  # another version has written them, or they are damaged
                for name, text, kind, samples in families:
                    kept.append(Family(str(name), str(text), kind))
                    kept[-1].samples = [
                        Sample(str(name), {str(key): str(label) for key, label in labels.items()}, float(value))
                        for name, labels, value in samples
                    ]
                self._ended[rank] = kept


def label_rank(samples: Iterable[Sample], rank: str, pid: str) -> list[Sample]:
    """Replace the label ``pid`` of the samples with ``rank``. Keep only one sample of each series.

    A forked data loader worker has the rank's gauges, with the value 0, as soon as it uses any metric. So the sample of
    the rank's own process ``pid`` counts, or else the last one.
    """
    unique = {}
    for sample in sorted(samples, key=lambda sample: sample.labels.get("pid") == pid):
        labels = {"rank": rank} | {key: value for key, value in sample.labels.items() if key != "pid"}
        unique[sample.name, tuple(sorted(labels.items()))] = sample._replace(labels=labels)
    return list(unique.values())


class NodeSeries:
    """The series that ddprun sets. host_metrics.py has the series of the machine.

    A series with one label is exported from the start, with the value 0 for each known value of the label.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        kinds = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}
        self._series: dict[str, Any] = {}
        for metric in metrics.CATALOGUE:
            if metric.set_by == "ddprun" and metric not in (*host_metrics.SERIES, metrics.HEARTBEAT):
                series = kinds[metric.kind](metric.name, metric.help, tuple(metric.labels), registry=registry)
                self._series[metric.name] = series
                for label, values in metric.labels.items() if len(metric.labels) == 1 else ():
                    for value in values:
                        series.labels(**{label: value})

    def set(self, metric: metrics.Metric, value: float, **labels: str) -> None:
        """Set a gauge."""
        self._of(metric, labels).set(value)

    def count(self, metric: metrics.Metric, number: int = 1, **labels: str) -> None:
        """Increase a counter."""
        self._of(metric, labels).inc(number)

    def _of(self, metric: metrics.Metric, labels: dict[str, str]) -> Any:
        series = self._series[metric.name]
        return series.labels(**labels) if labels else series

    def count_earlier(self, events: Iterable[Event]) -> None:
        """Count the restarts, requeues, exits, signals and lost steps in the node's earlier events."""
        counters = {
            "restart": metrics.RESTARTS,
            "rank_exited": metrics.RANK_EXITS,
            "signal": metrics.TERMINATION_SIGNALS,
        }
        for event in events:
            facts = event.facts
            if metric := counters.get(event.event):
                ((label, known),) = metric.labels.items()  # the event has a key of this name
                if facts.get(label) in known:  # another version of ddprun may have written other values
                    self.count(metric, **{label: facts[label]})
            elif event.event == "node_started" and "requeued_s" in facts:
                self.count(metrics.RESTARTS, reason="requeue")
            elif event.event == "recovered" and isinstance(lost := facts.get("steps_lost"), int):
                self.count(metrics.STEPS_LOST, max(0, lost))

    def state(self, state: str) -> None:
        """Set the state of this node, which must be one of metrics.JOB_STATES."""
        for other in metrics.JOB_STATES:
            self.set(metrics.JOB_STATE, other == state, state=other)


def serve_registry(registry: CollectorRegistry, host: str, port: int) -> int:
    """Serve /metrics on ``port`` or, if the port is taken, on a free one. Return the port. Raises OSError."""
    lock, body, made_at = threading.Lock(), b"", 0.0

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal body, made_at
        with lock:  # a page is reused for a moment, so that many scrapers cost no more than one
            if not body or time.monotonic() - made_at > 0.25:
                body, made_at = generate_latest(registry), time.monotonic()
            page = body
        request.send_response(200)
        request.send_header("Content-Type", CONTENT_TYPE_LATEST)
        request.send_header("Content-Length", str(len(page)))
        request.end_headers()
        request.wfile.write(page)

    return network.serve_http(host, port, answer, name="metrics", timeout_s=10.0)


class MetricHistory:
    """Writes the registry's values every few seconds as a row of history.csv (see ddpwire.history).

    A thread of ddprun writes the rows, so no rank waits for them. A full disk does not stop the training.
    """

    def __init__(self, node_dir: Path, registry: CollectorRegistry, files: FileWriter | None = None) -> None:
        self._path, self._files = node_dir / HISTORY, files or FileWriter()
        self._registry = registry
        self._lock = threading.Lock()
        self._every_s = ROW_INTERVAL_S
        self._rows: list[str] = []  # of an earlier ddprun, if its file has the same columns
        with contextlib.suppress(OSError, UnicodeDecodeError):
            header, *rows = self._path.read_text().splitlines() or [""]
            if header == HEADER:
                self._rows = [row for row in rows if row.count(",") == header.count(",")]  # without a torn last line
        with contextlib.suppress(ValueError, IndexError):
            first, last = (float(self._rows[place].partition(",")[0]) for place in (0, -1))
            self._every_s = ROW_INTERVAL_S * max(1.0, (last - first) / MAX_ROWS)
        self._write()

    def start(self) -> None:
        """Start a thread that adds rows until the process ends."""
        threading.Thread(target=self._run, name="history", daemon=True).start()

    def add_row(self) -> None:
        """Add a row with the current values."""
        samples = (sample for family in self._registry.collect() for sample in family.samples)
        row = line(time.time(), fold((sample.name, sample.labels, sample.value) for sample in samples))
        with self._lock:
            if len(self._rows) >= MAX_ROWS:  # keep every other row, and write new rows half as often
                self._rows = self._rows[1::2]
                self._every_s *= 2
                self._write()
            self._rows.append(row)
            self._files.submit(append, self._path, f"{row}\n".encode())

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            self.add_row()
            time.sleep(max(self._every_s, IDLE_RATIO * (time.monotonic() - began)))

    def _write(self) -> None:
        self._files.submit(replace_file, self._path, "\n".join([HEADER, *self._rows, ""]).encode())


class NodeMetrics:
    """All series of a node and of its ranks, with the registry, the endpoint, the history and the snapshot."""

    def __init__(self, node: Node, heartbeats: HeartbeatMonitor, environ: Mapping[str, str]) -> None:
        config, journal, before = node.config, node.journal, node.folder.previous_run
        self._config, self._node_dir, self._runtime = config, node.folder.path, node.folder.runtime
        self._heartbeats, self._files = heartbeats, node.files
        self._step, self._counters = (before.step, before.counters) if before else (None, {})
        self._journal = journal
        self._registry = CollectorRegistry()
        self.series = NodeSeries(self._registry)

        def pids() -> dict[str, str]:
            return {str(process.rank): str(process.pid) for process in journal.state.ranks}

        self.rank_series = RankSeries(lambda: self._runtime.path / METRICS, pids, heartbeats.running_beats)
        self.rank_series.restore(self._counters)
        for collector in (self.rank_series, host_metrics.machine_series()):
            self._registry.register(collector)
        self.series.set(
            metrics.BUILD_INFO,
            1,
            version=__version__,
            torch_version=metadata.version("torch"),
            python_version=platform.python_version(),
            image_digest=node_facts.image_digest(environ.get(names.IMAGE, "")),
        )
        self.series.set(
            metrics.RUN_INFO,
            1,
            run_id=config.run_id,
            run_uid=journal.state.run_uid,
            config_sha256=node_facts.config_sha256(config.command),
            **run_identity.owner(config, environ),
        )
        self.series.set(metrics.JOB_START, journal.state.started)
        self.series.set(metrics.WORLD_SIZE_EXPECTED, config.max_nodes * config.local_world_size)
        self.series.count_earlier(read_last_events(self._node_dir, 2 * MOST_BYTES))
        self.history = MetricHistory(self._node_dir, self._registry, self._files)

    def serve(self, own: str) -> None:
        """Serve the series at the configured address or, without one, at ``own``. Log the URL, or why this failed."""
        config = self._config
        host, log = config.metrics_host or own, self._journal.log
        try:
            port = serve_registry(self._registry, host, config.metrics_port)
        except OSError as error:
            log(f"no metrics: {host} cannot be bound: {error.strerror}")
            return
        if config.metrics_port not in (0, port):
            log(f"port {config.metrics_port} is in use: the metrics are on port {port}")
        is_any = host in ("0.0.0.0", "::")  # noqa: S104 (configured by the user)
        url = f"http://{own if is_any else host}:{port}/metrics"
        log(f"metrics at {url}")
        self._journal.update(metrics=url)
        try:
            registration.register(config, url)
        except OSError as error:
            log(f"the file for Prometheus cannot be written: {error.filename}: {error.strerror}")

    def start(self) -> None:
        """Start the threads that write the history and the summary until the process ends."""
        self.history.start()
        threading.Thread(target=self._write_summaries, name="summary", daemon=True).start()

    def _write_summaries(self) -> None:
        written: Future[None] | None = None
        while True:
            began = time.monotonic()
            if self._runtime.restore():
                self.rank_series.restore(self._counters)
                for process in self._journal.state.ranks:
                    with contextlib.suppress(OSError):  # the disk is full, or the folder has vanished again
                        (self._runtime.path / rank_metrics(process.rank)).mkdir(exist_ok=True)
            self.rank_series.keep_counts()
            if written is None or written.done():  # else the disk does not answer
                written = self.write_summary()
            time.sleep(max(2.5, IDLE_RATIO * (time.monotonic() - began)))

    def write_summary(self) -> "Future[None]":
        """Write the step and the counters for the next start of the run, perhaps on another machine."""
        steps = [self._step, *(beat.step for beat in self._heartbeats.beats().values())]
        self._step = max((step for step in steps if step is not None), default=None)
        self._counters |= self.rank_series.counts()
        state = self._journal.state
        summary = encode_summary(self._config.run_id, state.state, self._step, self._counters)
        return self._files.submit(replace_file, self._node_dir / SUMMARY, summary, False)

    def write_snapshot(self) -> None:
        """Write the final values, including the ranks' last gauges, because the node can no longer be scraped."""
        self.rank_series.with_last_gauges = True
        self.history.add_row()
        self._files.submit(replace_file, self._node_dir / SNAPSHOT, generate_latest(self._registry))
