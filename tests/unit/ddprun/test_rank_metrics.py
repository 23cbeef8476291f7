"""What ranks have counted is kept over their starts, without the files of ended processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddprank.heartbeat import Heart
from ddprun.files.node_dir import encode_summary, read_previous_run
from ddprun.health.heartbeat_monitor import HeartbeatMonitor
from ddprun.metrics import metrics
from ddprun.metrics.metrics import RankSeries
from ddpwire.run_files import HEARTBEAT, SUMMARY, RankProcess, rank_heartbeat

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


def test_the_same_run_goes_on_counting_and_another_one_begins_anew(tmp_path: Path) -> None:
    assert read_previous_run(tmp_path, "night-17") is None
    (tmp_path / "events.jsonl").write_text('{"time": 1, "event": "failed", "node": 0, "step": 41}\n')
    counters = {"0": [["steps", "", "counter", [["steps_total", {}, 3.0]]]]}
    (tmp_path / SUMMARY).write_bytes(encode_summary("night-17", "training", 40, counters))
    before = read_previous_run(tmp_path, "night-17")
    assert before is not None
    assert before.step == 41
    assert before.heard_at >= (tmp_path / "events.jsonl").stat().st_mtime
    assert before.counters == counters
    assert read_previous_run(tmp_path, "other") is None
    assert not (tmp_path / "events.jsonl").exists()
    (tmp_path / SUMMARY).write_bytes(encode_summary("none", "training", 40, counters))
    assert read_previous_run(tmp_path, "none") is None  # nobody gave these a name: each is another


def test_a_rank_that_has_ended_gives_no_heartbeat(tmp_path: Path) -> None:
    (tmp_path / HEARTBEAT).mkdir()
    monitor = HeartbeatMonitor(tmp_path, 0)
    ranks = [subprocess.Popen(["/bin/sleep", "1000"]) for _ in range(2)]
    try:
        monitor.track(
            tuple(
                RankProcess(rank=rank, local_rank=rank, pid=process.pid, log="") for rank, process in enumerate(ranks)
            )
        )
        for rank in range(2):
            Heart(str(tmp_path / rank_heartbeat(rank))).beat(7)
        assert monitor.running_beats().keys() == {0, 1}
        ranks[1].kill()
        ranks[1].wait()
        assert monitor.running_beats().keys() == {0}
        assert monitor.beats().keys() == {0, 1}
    finally:
        monitor.forget()
        for process in ranks:
            process.kill()
            process.wait()


def test_a_pause_of_ddprun_itself_is_no_silence_of_its_ranks(tmp_path: Path) -> None:
    (tmp_path / HEARTBEAT).mkdir()
    rank = subprocess.Popen(["/bin/sleep", "1000"])
    monitor = HeartbeatMonitor(tmp_path, 0)
    try:
        monitor.track((RankProcess(rank=0, local_rank=0, pid=rank.pid, log=""),))
        heart = Heart(str(tmp_path / rank_heartbeat(0)))

        def silence(*times_s: float) -> float:
            return [monitor.statuses(time_s)[0].silent_s for time_s in times_s][-1]

        heart.beat(7)
        assert silence(100.0) == 0
        assert silence(100.5, 101.0, 101.5) == 1.5
        assert silence(131.5, 132.0) == 3.0  # of the 30 s, one second counts
        heart.beat(7)  # the same step again: it lives
        assert silence(132.5) == 0
        assert silence(*(132.5 + 0.25 * number for number in range(1, 41))) == 10.0
    finally:
        monitor.forget()
        rank.kill()
        rank.wait()


@pytest.mark.parametrize(
    "sample", [["a_total", {}, "many"], ["a_total", {}, None], ["a_total", ["kind"], 1.0], ["a_total", {}], 7, None]
)
def test_damaged_counts_of_a_rank_are_left_out(tmp_path: Path, sample: Any) -> None:
    series = rank_series(tmp_path)
    sound = [["a", "Of mine.", "counter", [["a_total", {"kind": 1}, 3]]]]
    series.restore({"0": [["a", "Of mine.", "counter", [sample]]], "1": sound})
    collected = [sample for family in series.collect() for sample in family.samples if sample.name == "a_total"]
    assert [(sample.labels["kind"], sample.value) for sample in collected] == [("1", 3.0)]
