"""What a node tells of its ranks, its machine and its restarts, and what is kept over the starts of ranks."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from ddprank.heartbeat import Beat, Heart
from ddprun.files.node_dir import encode_summary, last_checkpoint, read_previous_run
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import host_metrics, metrics
from ddprun.metrics.metrics import MetricHistory, RankSeries
from ddprun.metrics.recovery import Downtime, Recovery
from ddpwire import metrics as catalogue
from ddpwire.history import read_history
from ddpwire.run_files import HEARTBEAT, OUTCOME, SNAPSHOT, SUMMARY, RankProcess, rank_heartbeat

COUNT = """
from prometheus_client import Counter, Gauge, Histogram
Counter("ddp_steps_total", "Steps.", ("kind",)).labels(kind="a").inc(10)
Histogram("ddp_seconds", "Of mine.", buckets=(1.0, 2.0)).observe(1.5)
Gauge("ddp_last_step", "The last.", multiprocess_mode="mostrecent").set(7)
"""


def count(folder: Path) -> None:
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    subprocess.run([sys.executable, "-c", COUNT], env=environ, check=True, timeout=60)


NO_PID = 1 << 22  # Linux gives no process this number


def rank_series(metrics_dir: Path, pid: str = "") -> RankSeries:
    return RankSeries(lambda: metrics_dir, lambda: {"0": pid})


def samples(series: RankSeries, rank: str = "0") -> dict[tuple[str, ...], float]:
    families = series.read(rank)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_counts_of_processes_that_have_ended_are_added_up_without_their_files(tmp_path: Path) -> None:
    folder, series = tmp_path / "rank-0", rank_series(tmp_path)
    folder.mkdir()
    for _ in range(3):
        count(folder)
    before = samples(series)
    assert before["ddp_steps_total", "a"] == 30
    assert ("ddp_last_step",) not in before
    series.with_last_gauges = True
    assert samples(series)["ddp_last_step",] == 7
    series.with_last_gauges = False
    (folder / f"counter_{NO_PID}.db").write_bytes((2**31 - 1).to_bytes(4, "little") + bytes(96))
    metrics.prepare_rank_dir(folder)
    series.keep_counts()
    assert [path.name for path in folder.iterdir()] == [f"counter_{NO_PID}.bad"], "what is damaged is set aside"
    assert samples(series) == before
    count(folder)
    series.keep_counts()
    assert samples(series)["ddp_seconds_count",] == 4
    assert samples(series)["ddp_seconds_bucket", "2.0"] == 4
    assert samples(series)["ddp_seconds_bucket", "1.0"] == 0


def test_the_time_of_ended_processes_goes_to_the_next_process_of_their_rank(tmp_path: Path) -> None:
    series = rank_series(tmp_path)
    families = [["ddp_productive_seconds", "", "counter", [["ddp_productive_seconds_total", {}, 2.5]]]]
    lost = [["ddp_unproductive_seconds_total", {"cause": cause}, 1.5] for cause in ("restart", "startup")]
    series.restore({"0": [*families, ["ddp_unproductive_seconds", "", "counter", lost]]})
    assert series.spent_s("0") == "productive=2.500,restart=1.500,startup=1.500"
    assert series.spent_s("1") == ""


FORK = """
import os, sys
from prometheus_client import Counter, Gauge
reads, loss = Counter("reads", "Read."), Gauge("loss", "Mine.")
loss.set(0.5)
for _ in range(3):
    if not (worker := os.fork()):
        reads.inc()
        os._exit(0)
    os.waitpid(worker, 0)
loss.set(0.25)
reads.inc()
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_of_a_gauge_that_forked_workers_have_as_well_the_ranks_own_value_counts(tmp_path: Path) -> None:
    folder = tmp_path / "rank-0"
    folder.mkdir()
    environ = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    argv = (sys.executable, "-c", FORK)
    with subprocess.Popen(argv, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout
        pid = rank.stdout.readline().strip()
        series = rank_series(tmp_path, pid)

        def values() -> dict[str, float]:
            return {sample.name: sample.value for family in series.collect() for sample in family.samples}

        assert values() == {"reads_total": 4, "loss": 0.25}
        series.keep_counts()
        assert [path.name for path in folder.glob("counter*")] == [f"counter_{pid}.db"]
        assert values() == {"reads_total": 4, "loss": 0.25}
        rank.communicate()


LEFT = (OUTCOME, SNAPSHOT, "events.jsonl", "events.1.jsonl", "history.csv")


def test_the_same_run_goes_on_counting_and_another_one_begins_anew(tmp_path: Path) -> None:
    assert read_previous_run(tmp_path, "night-17") is None
    events = (("checkpoint_saved", 5), ("checkpoint_loaded", 3), ("failed", 41))
    lines = (json.dumps({"time": 1, "event": event, "node": 0, "step": step}) for event, step in events)
    (tmp_path / "events.jsonl").write_text("\n".join((*lines, "")))
    counters = {"0": [["steps", "", "counter", [["steps_total", {}, 3.0]]]]}
    (tmp_path / SUMMARY).write_bytes(encode_summary("night-17", "training", 40, counters))
    before = read_previous_run(tmp_path, "night-17")
    assert before is not None
    assert before.step == 41
    assert before.heard_at >= (tmp_path / "events.jsonl").stat().st_mtime
    assert (before.counters, last_checkpoint(tmp_path)) == (counters, 3)
    for name in LEFT:
        (tmp_path / name).touch()
    assert read_previous_run(tmp_path, "night-17") is not None
    assert {path.name for path in tmp_path.iterdir()} == {*LEFT, SUMMARY} - {OUTCOME, SNAPSHOT}
    assert read_previous_run(tmp_path, "other") is None
    assert {path.name for path in tmp_path.iterdir()} == {SUMMARY}
    (tmp_path / SUMMARY).write_bytes(encode_summary("none", "training", 40, counters))
    assert read_previous_run(tmp_path, "none") is None  # nobody gave these a name: each is another


def test_a_start_has_met_a_later_one_has_waited_and_after_a_failure_the_time_since_a_sign_of_life_is_lost() -> None:
    downtime = Downtime(began_at=10.0)
    assert downtime.started(12.5) == "rendezvous=2.500,at=12.500"
    again = Downtime(began_at=10.0, requeued_s=90.04)
    assert again.requeued == {"requeued_s": 90.0}
    assert again.started(11.0) == "requeue=90.040,rendezvous=1.000,at=11.000"
    downtime.ended(50.0, hung=True, beats=[Beat(step=3, at_s=19.0), Beat(step=3, at_s=20.0)])
    assert downtime.started(51.0) == "hang=30.000,rendezvous=1.000,at=51.000"
    downtime.ended(53.0, hung=False, beats=[])  # before its first step: since it was started
    assert downtime.started(53.5) == "restart=2.000,rendezvous=0.500,at=53.500"


def test_lost_steps_are_counted_after_a_requeue_and_after_each_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    series, now = mock.Mock(), 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    recovery = Recovery(series, mock.Mock(), 40)
    recovery.steps([None, 38])
    recovery.steps([41, 45])
    recovery.failed(47)
    recovery.started()
    now += 10
    recovery.steps([43])
    recovery.failed(43)
    recovery.started()
    now += 61  # a script without heartbeats
    recovery.steps([None])
    assert not recovery.waits_for_step
    lost = [call.args[1] for call in series.count.mock_calls if call.args[0] == catalogue.STEPS_LOST]
    phases = [call.kwargs["phase"] for call in series.set.mock_calls]
    assert (lost, recovery.best) == ([3, 5], 47)
    assert phases == ["start", "total", "first_step", "start", "total"]


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("ddp_loss", "", registry=made).set(0.5)
    return made


def losses(folder: Path) -> list[float]:
    return [row["ddp_loss"] for row in read_history((folder / "history.csv").read_text())]


def test_rows_are_thinned_evenly(registry: CollectorRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_ROWS", 8)
    kept = MetricHistory(tmp_path, registry)
    gauge = registry._names_to_collectors["ddp_loss"]
    for number in range(30):
        gauge.set(number)  # type: ignore[attr-defined]
        kept.add_row()
    kept_losses = losses(tmp_path)
    assert len(kept_losses) <= 8
    assert kept_losses[-1] == 29
    assert kept_losses == sorted(kept_losses)
    assert kept._every_s == 64.0  # six times thinned; the test does not wait in between


def test_a_later_ddprun_writes_on(registry: CollectorRegistry, tmp_path: Path) -> None:
    MetricHistory(tmp_path, registry).add_row()
    with (tmp_path / "history.csv").open("a") as file:
        file.write("1234,0.")  # torn: it was killed
    MetricHistory(tmp_path, registry).add_row()
    assert losses(tmp_path) == [0.5, 0.5]


class NotSupportedError(Exception):
    """What NVML raises for a sensor that a device does not have."""


def power(device: int) -> int:
    if device == 1:
        raise NotSupportedError
    return 251_500


NVML = SimpleNamespace(
    NVMLError=NotSupportedError,
    NVML_TEMPERATURE_GPU=0,
    nvmlDeviceGetCount=lambda: 2,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetUtilizationRates=lambda device: SimpleNamespace(gpu=50 * device + 25, memory=1),
    nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=1024 * (device + 1), total=4096),
    nvmlDeviceGetPowerUsage=power,
    nvmlDeviceGetTemperature=lambda device, sensor: 40 + device + sensor,
)


def test_each_gpu_exports_its_series() -> None:
    registry = CollectorRegistry()
    registry.register(host_metrics.MachineSeries(NVML))
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if line.startswith("ddp_device")] == [
        'ddp_device_utilization_ratio{device="0"} 0.25',
        'ddp_device_utilization_ratio{device="1"} 0.75',
        'ddp_device_memory_used_bytes{device="0"} 1024.0',
        'ddp_device_memory_used_bytes{device="1"} 2048.0',
        'ddp_device_power_watts{device="0"} 251.5',
        'ddp_device_temperature_celsius{device="0"} 40.0',
        'ddp_device_temperature_celsius{device="1"} 41.0',
    ]


def test_cpu_and_memory_of_the_machine_are_exported() -> None:
    before = psutil.cpu_times().user
    modes = dict(host_metrics.cpu_seconds())
    assert before <= modes["user"] < before + 10
    assert dict(host_metrics.memory_bytes())["total"] == psutil.virtual_memory().total


@pytest.fixture
def monitored(tmp_path: Path) -> Iterator[tuple[HeartbeatMonitor, list[subprocess.Popen[bytes]], list[Heart]]]:
    """A monitor of two ranks, their processes and their heartbeats."""
    (tmp_path / HEARTBEAT).mkdir()
    monitor = HeartbeatMonitor(tmp_path, 0)
    processes = [subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(2)]
    monitor.track(tuple(RankProcess(rank=n, local_rank=n, pid=rank.pid, log="") for n, rank in enumerate(processes)))
    yield monitor, processes, [Heart(str(tmp_path / rank_heartbeat(rank))) for rank in range(2)]
    monitor.forget()
    for process in processes:
        process.kill()
        process.wait()


def test_a_rank_that_has_ended_gives_no_heartbeat(monitored: Any) -> None:
    monitor, processes, hearts = monitored
    for heart in hearts:
        heart.beat(7)
    assert monitor.running_beats().keys() == {0, 1}
    processes[1].kill()
    processes[1].wait()
    assert monitor.running_beats().keys() == {0}
    assert monitor.beats().keys() == {0, 1}


def test_a_pause_of_ddprun_itself_is_no_silence_of_its_ranks(monitored: Any) -> None:
    monitor, _, (heart, _) = monitored

    def silence(*times_s: float) -> float:
        return [monitor.statuses(time_s)[0].silent_s for time_s in times_s][-1]

    heart.beat(7)
    assert silence(100.0) == 0
    assert silence(100.5, 101.0, 101.5) == 1.5
    assert silence(131.5, 132.0) == 3.0  # of the 30 s, one second counts
    heart.beat(7)  # the same step again: it lives
    assert silence(132.5) == 0
    assert silence(*(132.5 + 0.25 * number for number in range(1, 41))) == 10.0
