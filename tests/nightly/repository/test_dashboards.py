"""The rules of a dashboard: each panel asks a question, has a unit and says what it shows, of series that exist."""

import json
import re

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.unit.repository.test_dashboards import board, panels

from ddpctl.monitoring.prometheus import DASHBOARDS


@pytest.mark.parametrize("name", DASHBOARDS)
def test_grafana_s_own_model_reads_a_dashboard_without_loss(name: str) -> None:
    register_default_plugins()
    read = Dashboard.from_json(board(name))
    assert json.loads(JSONEncoder(sort_keys=True).encode(read)) == board(name)


def test_rows_of_a_table_are_told_apart_by_labels_alone() -> None:
    """Grafana makes a column of a plain selector's name, and rows with different names are not one row."""
    for panel in (panel for name in DASHBOARDS for panel in panels(name) if panel["type"] == "table"):
        bare = [query["expr"] for query in panel["targets"] if re.fullmatch(r"[\w:]+\{.*?\}", query["expr"])]
        assert len(bare) <= 1, panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_numbers_and_places_of_their_own(name: str) -> None:
    everything = board(name)["panels"]
    assert [panel["id"] for panel in everything] == list(range(1, len(everything) + 1))
    titles = [panel["title"] for panel in everything if panel["type"] != "row"]
    assert len(set(titles)) == len(titles)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        columns, lines = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(column, line) for column in columns for line in lines}
        assert columns.stop <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
