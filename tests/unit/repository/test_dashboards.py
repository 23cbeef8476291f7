"""The rules of a dashboard: each panel asks a question, has a unit and says what it shows, of series that exist."""

import json
from typing import Any

import pytest
from grafana_foundation_sdk.models import units
from tests.unit.ddpctl.expressions import RECORDINGS, faults, names

from ddpctl.monitoring.prometheus import DASHBOARDS, static_file
from ddpwire.metrics import CATALOGUE

UNITS = {value for name, value in vars(units).items() if name[0].isupper() and isinstance(value, str)}


def board(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(static_file(f"{name}.json"))
    return document


def panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def expressions(name: str) -> list[str]:
    """Of the panels, and of the lines across them."""
    queries = [target["expr"] for panel in panels(name) for target in panel["targets"]]
    return queries + [annotation["expr"] for annotation in board(name).get("annotations", {}).get("list", [])]


EACH = [pytest.param(panel, id=f"{name}: {panel['title']}") for name in DASHBOARDS for panel in panels(name)]


@pytest.mark.parametrize("panel", EACH)
def test_a_panel_asks_a_question_and_explains_itself(panel: dict[str, Any]) -> None:
    assert panel["title"].endswith("?")
    assert panel["title"][0].isupper()
    assert len(panel["description"]) > 10
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    overrides = [entry for override in panel["fieldConfig"]["overrides"] for entry in override["properties"]]
    used = [
        panel["fieldConfig"]["defaults"]["unit"],
        *(override["value"] for override in overrides if override["id"] == "unit"),
    ]
    assert [unit for unit in used if unit not in UNITS and not unit.startswith("suffix:")] == []
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    assert (
        all(target["legendFormat"] for target in panel["targets"])
        or len(panel["targets"]) == 1
        or (panel["type"] == "table")
    )


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_asks_only_for_series_of_the_catalogue(name: str) -> None:
    assert {expr: problems for expr in expressions(name) if (problems := faults(expr))} == {}


def test_what_is_recorded_and_exported_is_shown() -> None:
    """A series that no panel asks for is one that nobody looks at: those are named here."""
    queried = set().union(*(names(expr) for board_ in DASHBOARDS for expr in expressions(board_)))
    queried |= set().union(*(names(rule.expr) for rule in RECORDINGS if rule.name in queried))
    metrics = {name.removesuffix("_sum").removesuffix("_count") for name in queried}
    unseen = {metric.name for metric in CATALOGUE} - metrics
    assert unseen == {"ddp_training_info", "ddp_preflight_duration_seconds"}  # ddpctl timeline shows the second
    assert {rule.name for rule in RECORDINGS} <= queried


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("rate(ddp_step_total[5m])", "no series ddp_step_total"),
        ('sum(ddp_step_phase_seconds_total{phase="dta"})', "ddp_step_phase_seconds_total: phase is never dta"),
        ('max(ddp_loss{where="loss"}) + 1', "ddp_loss has no label where"),
        ("a and on (run) (up == 1)", "no series a"),
    ],
)
def test_an_unknown_series_or_label_is_found(expr: str, fault: str) -> None:
    assert faults(expr) == [fault]
