"""The subcommand ``monitor`` with up, down, status and config. It shows all runs in Prometheus and Grafana.

docker compose runs both. compose.yaml is the same on all machines. The values that differ between machines are in the
file ``.env``, which docker compose reads.
"""

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ddpctl.command import NOT_FOUND, Command, Verb, once
from ddpctl.commands.arguments import Json, print_result
from ddpctl.errors import UnavailableError, UsageError, writing
from ddpctl.monitoring import prometheus
from ddpctl.monitoring.prometheus import Limits, Scraping, is_reachable
from ddpctl.operations.launcher import AppContext, open_context
from ddpctl.text import table
from ddpwire.run_files import TARGETS, read_regular, write_atomic

FOLDER = ".monitoring"  # for the files and the data, in the folder of the runs; no run can have this name
PROJECT = "ddpctl-monitor"
READY_S = 120.0
MARK = b"Made by ddpctl"  # every file of ``ddpctl monitor config`` contains this
SERVICES = ("prometheus", "grafana")
BY_HAND = "write the configuration for your own Prometheus with ddpctl monitor config"
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
    if not re.fullmatch(r"[1-9][0-9]*[hdwy]", retention):
        raise UsageError(f"--retention: '{retention}' is not a duration: expected h, d, w or y, such as 30d")
    context = open_context()
    scraping = _scraping(context, targets, interval, exporter)
    services = SERVICES if grafana else SERVICES[:1]
    settings = {"PROMETHEUS_PORT": port, "GRAFANA_PORT": grafana_port, "RETENTION": retention}
    urls = _start(context, scraping, prometheus.parse_limits(limit or ()), settings, services)
    for service in services:
        context.emit(f"{service.capitalize():<10}  {urls[service]}")
    context.emit("ddpctl monitor status shows what they scrape; ddpctl monitor down stops them")


@app.command()
def down(forget: Annotated[bool, typer.Option("--forget", help="Delete the recorded data, too.")] = False) -> None:
    """Stop Prometheus and Grafana. The recorded data is kept."""
    context = open_context()
    folder = context.root / FOLDER
    if not (folder / "compose.yaml").exists():
        context.emit("nothing to stop: the monitor is not running")
        return
    compose = context.executor.perform(find_compose())
    _run(context, _line(compose, folder, "down", *(["--volumes"] if forget else [])))
    if forget:
        shutil.rmtree(folder, ignore_errors=True)
    context.emit("Prometheus and Grafana are stopped")


@app.command()
def status(
    url: Annotated[
        str | None, typer.Option("--url", help="The URL of your own Prometheus [default: that of ddpctl monitor up].")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which nodes Prometheus scrapes and which alerts are firing."""
    urls = {"prometheus": url} if url else _urls_of(open_context().root)
    if not (address := urls.get("prometheus")):
        raise UnavailableError("no Prometheus was started here: run ddpctl monitor up, or give the --url of yours")
    nodes, firing = prometheus.scrape_targets(address), prometheus.firing_alerts(address)
    grafana = urls["grafana"] if "grafana" in urls and is_reachable(urls["grafana"]) else None
    lines = [f"Prometheus  {address}", *([f"Grafana     {grafana}"] if grafana else [])]
    if nodes:
        lines.append(f"nodes       {sum(node['up'] for node in nodes)} of {len(nodes)} answer")
        rows = [
            (f"  {node['run']}", node["node"], node["address"], "up" if node["up"] else node["error"]) for node in nodes
        ]
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
    limits = prometheus.parse_limits(limit or ())
    if kubernetes:
        sys.stdout.write(f"{prometheus.prometheus_rule(limits)}---\n{prometheus.dashboard_config_maps()}")
        return
    context = open_context()
    scraping = _scraping(context, targets, interval, exporter)
    if targets is None:  # Prometheus does not notice a folder that is made later
        with writing(Path(scraping.targets), "make"):
            Path(scraping.targets).mkdir(parents=True, exist_ok=True)
    _write_files(folder, prometheus.config_files(scraping, limits), force=force)
    context.emit(f"wrote {folder}: start prometheus --config.file={folder}/prometheus.yml, or copy its rule_files and")
    context.emit(f"scrape_configs to your own file; import {folder}/dashboards/run.json and fleet.json into Grafana")


def _scraping(context: AppContext, targets: Path | None, interval_s: float, exporters: list[str] | None) -> Scraping:
    if not SHORTEST_S <= interval_s <= LONGEST_S:  # also refuses NaN
        raise UsageError(f"--interval: {interval_s:g} is not allowed: expected {SHORTEST_S:g} to {LONGEST_S:g} seconds")
    if targets and targets.exists() and not targets.is_dir():
        raise UsageError(f"--targets: {targets} is a file: expected the folder with the file_sd files of the runs")
    folder = targets.absolute() if targets else context.root / TARGETS
    return Scraping(targets=str(folder), interval_s=interval_s, exporters=prometheus.parse_exporters(exporters or ()))


def _urls_of(root: Path) -> dict[str, str]:
    """Return the URL of each service, with the ports from ``.env``. Return no URLs if there is no such file."""
    try:
        lines = (root / FOLDER / ".env").read_text().splitlines()
    except OSError:
        return {}
    env = dict(line.split("=", 1) for line in lines if "=" in line)
    return _urls(env["PROMETHEUS_PORT"], env["GRAFANA_PORT"])


def _write_files(folder: Path, files: Mapping[str, str], *, force: bool = False) -> None:
    """Write the files.

    Raises UsageError if ``force`` is false and one of the files exists but was not written by ddpctl. Also raises it if
    ``folder`` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give the folder to write the configuration to")
    for name in files:
        path = folder / name
        if not force and path.exists() and not _is_ours(path):
            raise UsageError(f"{path} was not written by ddpctl: overwrite it with --force, or give another folder")
    for name, text in files.items():
        path = folder / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
            path.chmod(0o644)  # the containers may run as another user


def _is_ours(path: Path) -> bool:
    try:
        return MARK in read_regular(path)
    except OSError:
        return False


def _start(
    context: AppContext, scraping: Scraping, limits: Limits, settings: Mapping[str, object], services: Sequence[str]
) -> dict[str, str]:
    """Start the containers, or create them again if they are running, and wait until the servers answer.

    ``settings`` are variables for compose.yaml: the ports and the retention. Return the URL of each service.
    """
    folder, urls = context.root / FOLDER, _urls(settings["PROMETHEUS_PORT"], settings["GRAFANA_PORT"])
    compose = context.executor.perform(find_compose())
    running = context.executor.perform(once(_line(compose, folder, "ps", "-q")))
    if not running.stdout.strip():
        for flag, url in zip(("--port", "--grafana-port"), urls.values(), strict=True):
            if is_reachable(url):
                raise UsageError(f"{flag}: another program answers at {url}: choose another port")
    data = {"PROMETHEUS_DATA": folder / "data" / "prometheus", "GRAFANA_DATA": folder / "data" / "grafana"}
    for path in (*data.values(), Path(scraping.targets)):
        with writing(path, "make"):
            path.mkdir(parents=True, exist_ok=True)
    env = {
        **settings,
        "TARGETS": scraping.targets,
        "OWNER": f"{os.getuid()}:{os.getgid()}",  # the containers run as this user, who owns the data folders
        "DASHBOARDS": folder / "dashboards",
        **data,
    }
    env_file = "".join(f"{name}={value}\n" for name, value in env.items())
    _write_files(folder, {**prometheus.compose_files(scraping, limits), ".env": env_file}, force=True)
    todo = f" ({BY_HAND}, or set PROMETHEUS_IMAGE and GRAFANA_IMAGE to your own images)"
    _run(context, _line(compose, folder, "up", "-d", "--force-recreate", *services), todo)
    deadline = time.monotonic() + READY_S
    for service in services:
        while not is_reachable(urls[service]):
            if time.monotonic() > deadline:
                late = f"{service} does not answer at {urls[service]} after {READY_S:g} s"
                raise UnavailableError(
                    f"{late}; for the cause, run {' '.join((*compose, 'logs', service))} in {folder}"
                )
            time.sleep(0.2)
    return urls


def find_compose() -> Verb[tuple[str, ...]]:
    """Return the compose command of this machine.

    Raises UnavailableError if docker compose is not installed, or if the Docker daemon does not answer.
    """
    for argv in (("docker", "compose"), ("docker-compose",)):
        (version,) = yield (Command(argv=(*argv, "version"), probe=True, timeout_s=120),)
        if not version.returncode:
            break
    else:
        raise UnavailableError(f"monitor up needs docker compose, which is not installed: install it, or {BY_HAND}")
    (daemon,) = yield (Command(argv=("docker", "version"), probe=True, timeout_s=60),)
    if daemon.returncode not in (0, NOT_FOUND):  # docker-compose does not need the docker command
        reason = daemon.last_line("no message")
        raise UnavailableError(f"docker compose needs the Docker daemon, which does not answer ({reason}): start it")
    return argv


def _line(compose: tuple[str, ...], folder: Path, *args: str) -> Command:
    project = f"{PROJECT}-{os.getuid()}"  # each user of a machine needs a separate project
    argv = (*compose, "-p", project, "-f", str(folder / "compose.yaml"), *args)
    return Command(argv=argv, cwd=str(folder) if folder.exists() else None, timeout_s=600)


def _run(context: AppContext, command: Command, todo: str = "") -> None:
    output = context.executor.perform(once(command))
    if output.returncode:
        reason = f"failed with {output.returncode}: {output.last_line('no message')}"
        raise UnavailableError(f"{' '.join(command.argv)} {reason}{todo}")


def _urls(*ports: object) -> dict[str, str]:
    return {service: f"http://127.0.0.1:{port}" for service, port in zip(SERVICES, ports, strict=True)}
