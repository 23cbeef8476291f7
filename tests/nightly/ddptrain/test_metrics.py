"""What a rank leaves for ddprun to collect."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from tests.messages import assert_names

from ddprank.heartbeat import read_beat
from ddpwire.events import read_events
from ddpwire.metrics import CATALOGUE, OF_A_RANK, STEP_PHASES, Metric

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")


def of_here(metric: Metric) -> bool:
    return metric.set_by == "ddptrain" and not metric.needs_gpu


def read(folder: Path) -> dict[str, Family]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    return {family.name: family for family in registry.collect()}


def values_of(folder: Path) -> dict[tuple[str, ...], float]:
    samples = (sample for family in read(folder).values() for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_every_metric_of_the_catalogue_is_there(train: Callable[..., list], tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "DDP_HEARTBEAT_FILE": str(tmp_path / "heartbeat")}
    ended = train(*TINY, "--epochs=2", environ=environ)[0]
    assert (ended.code, ended.err) == (0, "")
    beat = read_beat(tmp_path / "heartbeat")
    assert beat.step == 8
    families = read(folder)
    ours = {metric.name.removesuffix("_total"): metric for metric in CATALOGUE if of_here(metric)}
    assert {name: family.type for name, family in families.items()} == {name: item.kind for name, item in ours.items()}
    values = values_of(folder)
    assert values["ddp_steps_total",] == 8
    assert values["ddp_samples_total",] == 128
    assert values["ddp_last_step",] == 8
    assert values["ddp_epoch",] == 2
    assert values["ddp_checkpoint_last_step",] == 8
    assert values["ddp_step_duration_seconds_count",] == 8
    assert values["ddp_checkpoint_duration_seconds_count", "save"] == 2
    assert values["ddp_checkpoint_failures_total", "save", "enospc"] == 0
    assert values["ddp_checkpoint_failures_total", "load", "missing"] == 0
    assert values["ddp_checkpoints_retained",] == 2
    assert values["ddp_nonfinite_total", "loss"] == 0
    assert values["ddp_grad_norm",] > 0
    spent = [values["ddp_step_phase_seconds_total", phase] for phase in STEP_PHASES]
    assert sum(spent) == pytest.approx(values["ddp_productive_seconds_total",])
    assert values["ddp_step_duration_seconds_sum",] == pytest.approx(values["ddp_productive_seconds_total",])
    assert all(values["ddp_unproductive_seconds_total", cause] > 0 for cause in ("startup", "checkpoint", "evaluation"))
    assert values["ddp_training_info", "none", "synthetic", "cpu", "simple"] == 1
    assert values["ddp_planned_steps",] == 8
    assert values["ddp_model_flops_total",] > 0
    num_on_gpu = sum(len(next(iter(item.labels.values()), ("",))) for item in OF_A_RANK if item.needs_gpu)
    assert len(values) + num_on_gpu <= 80  # the budget of a rank
    accuracy = float(ended.out.splitlines()[-4].split()[2]) / 100
    assert round(values["ddp_eval_accuracy_ratio", "test"], 4) == round(accuracy, 4)


def test_a_folder_that_is_not_there_stops_no_training(train: Callable[..., list]) -> None:
    ended = train(*TINY, "--epochs=1", environ={"PROMETHEUS_MULTIPROC_DIR": "/nonexistent"})[0]
    assert ended.code == 0
    assert_names(re.sub(r"_\d+\.db", "_PID.db", ended.err), "2", "/nonexistent/counter_PID.db")


@pytest.mark.parametrize("path", ["device", "loader"])
def test_the_phases_of_two_ranks_add_up_to_their_steps(train: Callable[..., list], tmp_path: Path, path: str) -> None:
    ended = []
    folders = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
    for folder in folders:
        folder.mkdir()
    pick = (
        "import os, runpy, sys; os.environ['PROMETHEUS_MULTIPROC_DIR'] += os.environ['RANK']; "
        "sys.argv[0] = 'ddptrain'; runpy.run_module('ddptrain', run_name='__main__')"
    )
    options = ("--data=synthetic", "--synthetic-samples=512", "--synthetic-shape=3x16x16", "--model=simple")
    ended = train(
        *options,
        "--batch-size=16",
        "--epochs=2",
        f"--input={path}",
        size=2,
        command=("-c", pick),
        environ={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "rank-"), "DDP_LOST_BEFORE": "rendezvous=1.5,hang=40"},
    )
    assert [(process.code, process.err) for process in ended] == [(0, "")] * 2
    for rank, folder in enumerate(folders):
        values = values_of(folder)
        phases = {phase: values["ddp_step_phase_seconds_total", phase] for phase in STEP_PHASES}
        steps_s = values["ddp_step_duration_seconds_sum",]
        assert sum(phases.values()) == pytest.approx(steps_s)
        assert values["ddp_productive_seconds_total",] == pytest.approx(steps_s)
        assert all(phases[phase] > 0 for phase in STEP_PHASES if phase != "h2d" or path == "loader")
        assert values["ddp_comm_seconds_total", "exposed"] == pytest.approx(phases["comm_exposed"])
        assert values["ddp_unproductive_seconds_total", "rendezvous"] == 1.5
        assert values["ddp_unproductive_seconds_total", "hang"] == 40
        exported = {metric.name.removesuffix("_total") for metric in CATALOGUE if of_here(metric)}
        of_rank_0 = {metric.name.removesuffix("_total") for metric in CATALOGUE if metric.by_rank_0}
        assert set(read(folder)) == (exported if rank == 0 else exported - of_rank_0)


def test_a_start_from_a_checkpoint_tells_which_one(train: Callable[..., list], tmp_path: Path) -> None:
    """Else a training that was started again a minute ago would seem never to have saved."""
    assert train(*TINY, "--epochs=2", f"--checkpoint-dir={tmp_path}/checkpoints")[0].code == 0
    (newest,) = (tmp_path / "checkpoints").glob("step-*8.pt")
    os.utime(newest, (1000.0, 1000.0))
    (folder := tmp_path / "metrics").mkdir()
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(folder)}
    options = (*TINY, "--epochs=2", f"--checkpoint-dir={tmp_path}/checkpoints")
    assert train(*options, environ=environ)[0].code == 0
    values = values_of(folder)
    assert values["ddp_checkpoint_last_success_timestamp_seconds",] == 1000.0
    assert values["ddp_checkpoint_last_step",] == 8
    assert values["ddp_checkpoint_bytes",] == newest.stat().st_size


def test_steps_that_are_taken_again_are_no_progress(train: Callable[..., list], tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "DDP_STEPS_BEFORE": "8"}
    output = {"DDP_EVENTS_FILE": str(tmp_path / "events.jsonl")}
    assert train(*TINY, "--epochs=2", environ=environ | output)[0].code == 0
    (event,) = (
        entry for entry in read_events((tmp_path / "events.jsonl").read_text()) if entry.event == "started_over"
    )
    assert event.facts == {"steps": 8}, "there was no checkpoint"
    values = values_of(folder)
    assert values["ddp_productive_seconds_total",] == 0
    steps_s = values["ddp_step_duration_seconds_sum",]
    assert values["ddp_unproductive_seconds_total", "recompute"] == pytest.approx(steps_s)
