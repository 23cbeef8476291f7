"""A node's history: rows are thinned evenly, and a later ddprun of the node writes on."""

from pathlib import Path

from prometheus_client import CollectorRegistry
from tests.unit.ddprun import test_rank_metrics

from ddprun.metrics.metrics import MetricHistory
from ddpwire.history import HEADER, read_history

registry = test_rank_metrics.registry  # the fixture


def losses(folder: Path) -> list[float]:
    return [row["ddp_loss"] for row in read_history((folder / "history.csv").read_text())]


def test_columns_of_another_version_are_begun_anew(registry: CollectorRegistry, tmp_path: Path) -> None:
    (tmp_path / "history.csv").write_text("time,other\n1,2\n")
    MetricHistory(tmp_path, registry).add_row()
    assert (tmp_path / "history.csv").read_text().splitlines()[0] == HEADER
    assert losses(tmp_path) == [0.5]


def test_where_nothing_can_be_written_nothing_is_raised(registry: CollectorRegistry, tmp_path: Path) -> None:
    kept = MetricHistory(tmp_path / "no" / "such", registry)
    kept.add_row()
    assert list(tmp_path.iterdir()) == []
