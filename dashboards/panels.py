"""Makes the panels of the dashboards with Grafana's SDK. A panel has a question as its title, a unit and a description.

Only ``make specs`` runs this code. The resulting JSON is checked in (cli/ddpctl/monitoring). ddpctl never imports it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

WIDTH = 24
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, kw_only=True)
class Query:
    """An expression, and the legend of its series."""

    expr: str
    legend: str = ""


def q(expr: str, legend: str = "") -> Query:
    """Return a query."""
    return Query(expr=expr, legend=legend)


def series(
    question: str, unit: str, description: str, *queries: Query, width: int = 12, stacked: bool = False, top: Any = None
) -> Any:
    """Return a graph with lines over time."""
    panel = timeseries.Panel().line_width(1).fill_opacity(60 if stacked else 8).min(0)
    panel = panel.span_nulls(False).show_points(common_models.VisibilityMode.AUTO)
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    mode = common_models.TooltipDisplayMode.MULTI
    panel = panel.tooltip(common.VizTooltipOptions().mode(mode).sort(common_models.SortOrder.DESCENDING))
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL))
    if top is not None:
        panel = panel.max(top)
    return _filled(panel, question, unit, description, queries, width, height=8)


def number(
    question: str, unit: str, description: str, *queries: Query, width: int = 4, red: Any = None, below: bool = False
) -> Any:
    """Return a panel with the current value in large digits.

    The value is shown in red from ``red`` upwards or, with ``below``, up to ``red``.
    """
    calcs = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().reduce_options(calcs).graph_mode(common_models.BigValueGraphMode.NONE)
    panel = panel.text_mode(common_models.BigValueTextMode.AUTO).thresholds(_thresholds(red, below))
    return _filled(panel, question, unit, description, queries, width, height=4, instant=True)


def word(question: str, description: str, query: Query, width: int = 4) -> Any:
    """Return a panel with the legend of the current series instead of its value."""
    panel = number(question, "none", description, query, width=width)
    return panel.text_mode(common_models.BigValueTextMode.NAME)


def bars(question: str, unit: str, description: str, query: Query, *, red_below: float, width: int = 12) -> Any:
    """Return a panel with a bar from 0 to 1 for each series."""
    calcs = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = bargauge.Panel().reduce_options(calcs).min(0).max(1).thresholds(_thresholds(red_below, below=True))
    panel = panel.orientation(common_models.VizOrientation.HORIZONTAL)
    return _filled(panel, question, unit, description, (query,), width, height=8, instant=True)


def rows_of(
    question: str,
    description: str,
    columns: dict[str, tuple[str, Query]],
    *,
    hidden: tuple[str, ...] = ("Time",),
    link: str = "",
    width: int = WIDTH,
    height: int = 8,
) -> Any:
    """Return a table with a row for each set of labels, and a column (name, unit and query) for each query."""
    panel = table.Panel().filterable(True)
    values = {}
    for place, (name, (unit, _)) in enumerate(columns.items()):
        values[name] = f"Value #{chr(65 + place)}" if len(columns) > 1 else "Value"
        panel = panel.override_by_name(
            values[name],
            [models.DynamicConfigValue("unit", unit), models.DynamicConfigValue("displayName", name)],
        )
    if link:
        target = {"title": "its dashboard", "url": link}
        shown = [models.DynamicConfigValue("links", [target]), models.DynamicConfigValue("displayName", "run")]
        panel = panel.override_by_name("job_id", shown)
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    excluded = dict.fromkeys(hidden, True)
    organize = models.DataTransformerConfig(id_val="organize", options={"excludeByName": excluded})
    panel = panel.with_transformation(organize)
    queries = tuple(query for _, query in columns.values())
    return _filled(panel, question, "none", description, queries, width, height, instant=True, as_table=True)


def variable(name: str, label: str, query: str, *, every: bool) -> Any:
    """Return a variable of the dashboard: the reader chooses among the values of a label."""
    built = dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(query)
    built = built.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(models.VariableSort.ALPHABETICAL_ASC)
    return built.include_all(True).all_value(".*").current(_every()) if every else built


def new_board(title: str, uid: str, description: str, *, refresh: str, since: str) -> Any:
    """Return a dashboard without panels, in which the reader chooses a Prometheus and namespaces."""
    made = dashboard.Dashboard(title).uid(uid).tags(["ddpctl"]).editable().refresh(refresh).time(since, "now")
    made = made.description(f"{description} Made by ddpctl; `make specs` in its repository writes it again.")
    made = made.timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    made = made.with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    return made.with_variable(variable("namespace", "Namespace", "label_values(ddp_run_info, namespace)", every=True))


def text_of(made: Any, rows: Mapping[str, Sequence[Any]]) -> str:
    """Return the JSON of a dashboard with these panels. The keys are row titles. Panels are numbered in order."""
    for title, panels in rows.items():
        made = made.with_row(dashboard.Row(title))
        for panel in panels:
            made = made.with_panel(panel)
    board = made.build()
    for number_, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number_
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(board)), indent=1, sort_keys=True) + "\n"


def _every() -> Any:
    return models.VariableOption(selected=True, text="All", value="$__all")


def _thresholds(red: Any, below: bool) -> Any:
    good, bad = ("red", "green") if below else ("green", "red")
    steps = [models.Threshold(color=good if red is not None else "text", value=None)]
    steps += [models.Threshold(color=bad, value=red)] if red is not None else []
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)


def _filled(
    panel: Any,
    question: str,
    unit: str,
    description: str,
    queries: tuple[Query, ...],
    width: int,
    height: int,
    *,
    instant: bool = False,
    as_table: bool = False,
) -> Any:
    panel = panel.title(question).unit(unit).description(description).datasource(SOURCE).span(width).height(height)
    for place, query in enumerate(queries):
        target = prometheus.Dataquery().expr(query.expr).ref_id(chr(65 + place)).legend_format(query.legend)
        target = target.instant() if instant else target.range()
        target = target.format(PromQueryFormat.TABLE) if as_table else target
        panel = panel.with_target(target)
    return panel
