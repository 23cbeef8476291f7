"""A node's history: rows are thinned evenly, and a later ddprun of the node writes on."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from ddprun.metrics import metrics
from ddprun.metrics.metrics import MetricHistory
from ddpwire.history import read_history


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
