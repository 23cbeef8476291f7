"""The subcommand ``monitor`` with up, down, status and config. It shows all runs in Prometheus and Grafana."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.commands.arguments import Json, print_result
from ddpctl.errors import UnavailableError, UsageError, writing
from ddpctl.operations.launcher import AppContext, open_context
from ddpctl.text import table
from ddpwire.run_files import TARGETS

if TYPE_CHECKING:
    from ddpctl.monitoring.prometheus import Scraping

SHORTEST_S, LONGEST_S = 0.1, 3600.0  # limits of the time between two scrapes

app = typer.Typer(
    name="monitor",
    rich_markup_mode=None,
    add_completion=False,
    help="Show all runs in Prometheus and Grafana.",
)

LimitFlags = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=VALUE", help="The limit of an alert (see docs/alerts.md). May be repeated."),
]
ExporterFlags = Annotated[
    list[str] | None,
    typer.Option(
        "--exporter",
        metavar="NAME=PORT",
        help="Also scrape this port of the machines, for example node=9100 or dcgm=9400. May be repeated.",
    ),
]
TargetsFlag = Annotated[
    Path | None,
    typer.Option("--targets", metavar="FOLDER", help="The folder with the file_sd files [default: that of your runs]."),
]
IntervalFlag = Annotated[
    float, typer.Option("--interval", help="Seconds between two scrapes of a node, from 0.1 to 3600.")
]


@app.command()
def up(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Prometheus' port on 127.0.0.1.")] = 9090,
    grafana_port: Annotated[
        int, typer.Option("--grafana-port", min=1, max=65535, help="Grafana's port on 127.0.0.1.")
    ] = 3000,
    grafana: Annotated[bool, typer.Option("--grafana/--no-grafana", help="Whether to start Grafana too.")] = True,
    retention: Annotated[str, typer.Option("--retention", help="How long Prometheus keeps its data.")] = "30d",
    interval: IntervalFlag = 10.0,
    targets: TargetsFlag = None,
    exporter: ExporterFlags = None,
    limit: LimitFlags = None,
) -> None:
    """Start Prometheus and Grafana.

    docker compose runs them on the loopback address of this machine. To change settings, run the command again. The
    recorded data is kept.
    """
    from ddpctl.monitoring import prometheus, stack

    if not re.fullmatch(r"[1-9][0-9]*[hdwy]", retention):
        raise UsageError(f"--retention: '{retention}' is not a duration: expected h, d, w or y, such as 30d")
    context = open_context()
    scraping = _scraping(context, targets, interval, exporter)
    services = stack.SERVICES if grafana else stack.SERVICES[:1]
    limits, ports = prometheus.parse_limits(limit or ()), (port, grafana_port)
    urls = stack.up(context, scraping, limits, ports=ports, retention=retention, only=services)
    for service in services:
        context.emit(f"{service.capitalize():<10}  {urls[service]}")
    context.emit("ddpctl monitor status shows what they scrape; ddpctl monitor down stops them")


@app.command()
def down(forget: Annotated[bool, typer.Option("--forget", help="Delete the recorded data, too.")] = False) -> None:
    """Stop Prometheus and Grafana. The recorded data is kept."""
    from ddpctl.monitoring import stack

    context = open_context()
    was_running = stack.down(context, forget=forget)
    context.emit("Prometheus and Grafana are stopped" if was_running else "nothing to stop: the monitor is not running")


@app.command()
def status(
    url: Annotated[
        str | None, typer.Option("--url", help="The URL of your own Prometheus [default: that of ddpctl monitor up].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which nodes Prometheus scrapes and which alerts are firing."""
    from ddpctl.monitoring import prometheus, stack

    urls = {"prometheus": url} if url else stack.urls_of(open_context().root)
    if not (address := urls.get("prometheus")):
        raise UnavailableError("no Prometheus was started here: run ddpctl monitor up, or give the --url of yours")
    nodes, firing = prometheus.scrape_targets(address), prometheus.firing_alerts(address)
    grafana = urls["grafana"] if "grafana" in urls and prometheus.is_reachable(urls["grafana"]) else None
    lines = [f"Prometheus  {address}", *([f"Grafana     {grafana}"] if grafana else [])]
    if nodes:
        lines.append(f"nodes       {sum(node['up'] for node in nodes)} of {len(nodes)} answer")
        rows = [(f"  {it['run']}", it["node"], it["address"], "up" if it["up"] else it["error"]) for it in nodes]
        lines += table([("  RUN", "NODE", "ADDRESS", "STATE"), *rows])
    else:
        lines.append("nodes       none: Prometheus knows no active run (a node is scraped until its run ends)")
    lines.append(f"alerts      {len(firing) or 'none'}")
    lines += ["  {alert} ({severity}, {state}): {summary}".format(**alert) for alert in firing]
    document = {"prometheus": address, "grafana": grafana, "nodes": nodes, "alerts": firing}
    print_result(document, lines, as_json=as_json)


@app.command()
def config(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder to write the files to.")] = Path(
        "monitoring"
    ),
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Print a PrometheusRule and ConfigMaps for Kubernetes instead.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that ddpctl did not write.")] = False,
    interval: IntervalFlag = 10.0,
    targets: TargetsFlag = None,
    exporter: ExporterFlags = None,
    limit: LimitFlags = None,
) -> None:
    """Write configuration files for your own Prometheus and Grafana.

    The files are prometheus.yml, rules.yaml and the dashboards. You can use them without changes.
    """
    from ddpctl.monitoring import prometheus, stack

    limits = prometheus.parse_limits(limit or ())
    if kubernetes:
        sys.stdout.write(f"{prometheus.prometheus_rule(limits)}---\n{stack.dashboard_config_maps()}")
        return
    context = open_context()
    scraping = _scraping(context, targets, interval, exporter)
    if targets is None:  # Prometheus does not notice a folder that is made later
        with writing(Path(scraping.targets), "make"):
            Path(scraping.targets).mkdir(parents=True, exist_ok=True)
    stack.write_files(folder, stack.config_files(scraping, limits), force=force)
    context.emit(f"wrote {folder}: start prometheus --config.file={folder}/prometheus.yml, or copy its rule_files and")
    context.emit(f"scrape_configs to your own file; import {folder}/dashboards/run.json and fleet.json into Grafana")


def _scraping(context: AppContext, targets: Path | None, interval_s: float, exporters: list[str] | None) -> "Scraping":
    from ddpctl.monitoring.prometheus import Scraping, parse_exporters

    if not SHORTEST_S <= interval_s <= LONGEST_S:  # also refuses NaN
        raise UsageError(f"--interval: {interval_s:g} is not allowed: expected {SHORTEST_S:g} to {LONGEST_S:g} seconds")
    if targets and targets.exists() and not targets.is_dir():
        raise UsageError(f"--targets: {targets} is a file: expected the folder with the file_sd files of the runs")
    folder = targets.absolute() if targets else context.root / TARGETS
    return Scraping(targets=str(folder), interval_s=interval_s, exporters=parse_exporters(exporters or ()))
