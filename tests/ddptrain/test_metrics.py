"""What a rank leaves for ddprun to collect."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from ddpwire.catalogue import CATALOGUE, Metric
from ddpwire.heartbeat import read_beat
from ddpwire.rank_catalogue import STEP_PHASES

TINY = ("--data=synthetic", "--synthetic-samples=64", "--synthetic-shape=1x8x8", "--model=simple", "--batch-size=16")


def of_here(metric: Metric) -> bool:
    return metric.set_by == "ddptrain" and not metric.needs_gpu


def test_every_metric_of_the_catalogue_is_there(train: Callable[..., list], tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "DDP_HEARTBEAT_FILE": str(tmp_path / "heartbeat")}
    ended = train(*TINY, "--epochs=2", environ=environ)[0]
    assert (ended.code, ended.err) == (0, "")
    beat = read_beat(tmp_path / "heartbeat")
    assert beat is not None
    assert beat.step == 8
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(folder))
    families = {family.name: family for family in registry.collect()}
    ours = {metric.name.removesuffix("_total"): metric for metric in CATALOGUE if of_here(metric)}
    assert {name: family.type for name, family in families.items()} == {name: one.kind for name, one in ours.items()}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
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
    assert sum(spent) == pytest.approx(values["ddp_productive_seconds_total",], rel=0.02)
    assert values["ddp_step_duration_seconds_sum",] == pytest.approx(values["ddp_productive_seconds_total",])
    assert all(values["ddp_unproductive_seconds_total", cause] > 0 for cause in ("startup", "checkpoint", "evaluation"))
    assert len(values) <= 80  # the budget of a rank
    accuracy = float(ended.out.splitlines()[-4].split()[2]) / 100
    assert round(values["ddp_eval_accuracy_ratio", "test"], 4) == round(accuracy, 4)


def test_a_folder_that_is_not_there_stops_no_training(train: Callable[..., list]) -> None:
    ended = train(*TINY, "--epochs=1", environ={"PROMETHEUS_MULTIPROC_DIR": "/nonexistent"})[0]
    assert ended.code == 0
    told = re.sub(r"_\d+\.db", "_PID.db", ended.err)
    assert told == (
        "ddptrain: training without metrics: [Errno 2] No such file or directory: '/nonexistent/counter_PID.db'\n"
    )
