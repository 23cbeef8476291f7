"""The files with which Prometheus and Grafana find, scrape, judge and show the runs, and a client of Prometheus' API.

docs/alerts.md explains each alert. ``rules.yaml`` has the recording rules and the alerts. It is a jinja2 template, in
which only the limits vary. Its delimiters are << and >>, because Prometheus' own templates have {{ and }}.
"""

import json
import re
import textwrap
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Annotated, Any

from ddpctl.errors import UnavailableError, UsageError
from ddpctl.job.schema import validate
from ddpctl.job.values import Options, between
from ddpctl.text import quote
from ddpwire.machine import MAX_PORT

JOB = "ddp"
HEAD = """\
# Made by ddpctl monitor. It overwrites your edits.
# To use a Prometheus that you have, add rule_files and the entries of scrape_configs to its file.
"""
TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
DAYS = 30 * 86400  # the largest limit, because a later alert does not help
LOOKBACK_S = 300.0  # for how long Prometheus uses a sample as the current one
MOUNTED_TARGETS = "/targets"  # the path of the targets' folder in the containers
DASHBOARDS = ("run", "fleet")
COMPOSE_FILES = ("compose.yaml", "provisioning/datasources/prometheus.yaml", "provisioning/dashboards/ddpctl.yaml")


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """The limits at which the alerts fire."""

    hold: Annotated[float, between(0, 86400)] | None = None
    """Seconds for which a condition must hold before its alert fires."""
    first_step: Annotated[float, between(1, DAYS)] = 900.0
    """Seconds from the start to the first step."""
    stalled_step: Annotated[float, between(1, DAYS)] = 180.0
    """Seconds without a step, after the first step."""
    heartbeat: Annotated[float, between(1, DAYS)] = 180.0
    """Seconds without a heartbeat from a rank."""
    skew: Annotated[float, between(1, 100)] = 1.25
    """The slowest rank's own step time, divided by the median."""
    data_share: Annotated[float, between(0, 1)] = 0.3
    """Share of the step time that is spent waiting for data."""
    checkpoint_age: Annotated[float, between(1, DAYS)] = 3600.0
    """Seconds since the last checkpoint, or since the start."""
    restarts: Annotated[float, between(1, 1000)] = 3.0
    """Restarts within an hour."""
    ettr: Annotated[float, between(0, 1)] = 0.8
    """Share of the last hour in which steps were taken."""
    clock_offset: Annotated[float, between(0, 86400)] = 1.0
    """Seconds between a node's clock and node 0's."""


def static_file(name: str) -> str:
    """Return the text of a file in this package."""
    return (resources.files("ddpctl.monitoring") / name).read_text()


def parse_limits(settings: Iterable[str]) -> Limits:
    """Parse limits such as ``checkpoint_age=7200``. Raises UsageError."""
    given = {name: text for name, _, text in (setting.partition("=") for setting in settings)}
    values, problems = validate(Limits, given, noun="the alerts")
    for problem in problems:
        raise UsageError(f"--limit{' ' * bool(problem.field)}{problem.field}: {problem.text}")
    return Limits(**values)


def rule_groups(limits: Limits) -> str:
    """Return the text of a rule file for Prometheus. All rules are in one group, so they are evaluated in order."""
    from jinja2 import StrictUndefined, Template

    template = Template(
        static_file("rules.yaml"),
        variable_start_string="<<",
        variable_end_string=">>",
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    numbers = {name: f"{value:g}" for name, value in asdict(limits).items() if value is not None}

    def hold(seconds: float) -> str:
        return promql_duration(seconds if limits.hold is None else limits.hold)

    lookback = promql_duration(max(limits.first_step, LOOKBACK_S))
    return str(template.render({**numbers, "hold": hold, "lookback": lookback}))


def prometheus_rule(limits: Limits) -> str:
    """Return the rules as a PrometheusRule, the format of the Prometheus Operator."""
    head, groups = rule_groups(limits).split("\n", 1)
    return f"""\
{head}
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: ddpctl
  # Labels that your Prometheus selects (ruleSelector). For kube-prometheus-stack, the name of its Helm release:
  # labels: {{release: kube-prometheus-stack}}
spec:
{textwrap.indent(groups, "  ")}"""


def promql_duration(seconds: float) -> str:
    """Format a duration for Prometheus: whole seconds as seconds, and other durations as milliseconds."""
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"


@dataclass(frozen=True, kw_only=True)
class Scraping:
    """What Prometheus scrapes, and how often."""

    targets: str  # the folder of the file_sd files
    interval_s: float = 10.0
    exporters: tuple[tuple[str, int], ...] = ()  # the job names and ports of other exporters on the same machines


def parse_exporters(settings: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Parse exporters such as ``node=9100`` and ``dcgm=9400``. Raises UsageError."""
    ports: dict[str, int] = {}
    for setting in settings:
        name, _, port = setting.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name == JOB or name in ports:
            raise UsageError(f"--exporter: {quote(name)} is invalid or in use: expected NAME=PORT, such as dcgm=9400")
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
            raise UsageError(f"--exporter {name}: {quote(port)} is not a port: expected 1 to {MAX_PORT}")
        ports[name] = int(port)
    return tuple(ports.items())


def prometheus_yml(scraping: Scraping) -> str:
    """Return the text of prometheus.yml. The file rules.yaml must be in the same folder.

    Another exporter is scraped once on each machine, even if the machine has several nodes.
    """
    import yaml

    interval = promql_duration(scraping.interval_s)
    jobs: list[dict[str, Any]] = []
    for name, port in ((JOB, None), *scraping.exporters):
        files = {"files": [f"{scraping.targets}/*.json"], "refresh_interval": "30s"}  # Prometheus sees changes at once
        jobs.append({"job_name": name, "file_sd_configs": [files]})
        if port is not None:
            address = {
                "source_labels": ["__address__"],
                "regex": r"(.+):\d+",
                "target_label": "__address__",
                "replacement": f"$1:{port}",
            }
            jobs[-1]["relabel_configs"] = [address, {"action": "labelkeep", "regex": "__.*|job"}]
    config = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": jobs,
    }
    return HEAD + yaml.safe_dump(config, sort_keys=False, width=1000, allow_unicode=True)


def config_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """Return the configuration of Prometheus and the dashboards, keyed by path."""
    return {
        "prometheus.yml": prometheus_yml(scraping),
        "rules.yaml": rule_groups(limits),
        **{f"dashboards/{name}.json": static_file(f"{name}.json") for name in DASHBOARDS},
    }


def compose_files(scraping: Scraping, limits: Limits) -> dict[str, str]:
    """Return all files except ``.env``, keyed by path. docker/monitoring has the same files without the dashboards."""
    files = config_files(replace(scraping, targets=MOUNTED_TARGETS), limits)
    return {**files, **{name: static_file(name) for name in COMPOSE_FILES}}


def dashboard_config_maps() -> str:
    """Return a ConfigMap for each dashboard, with the label that Grafana's sidecar searches for by default."""
    return "---\n".join(
        f"""\
# Made by ddpctl monitor. Apply it in the namespace that Grafana's sidecar watches.
apiVersion: v1
kind: ConfigMap
metadata:
  name: ddpctl-dashboard-{name}
  labels:
    grafana_dashboard: '1'
data:
  ddpctl-{name}.json: |
{textwrap.indent(static_file(f"{name}.json"), "    ")}"""
        for name in DASHBOARDS
    )


def is_reachable(url: str) -> bool:
    """Return whether an HTTP server answers at ``url``. Any status is an answer."""
    try:
        _open(url).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def scrape_targets(url: str) -> list[dict[str, Any]]:
    """Return the nodes that Prometheus scrapes. Raises UnavailableError if Prometheus does not answer."""
    targets = [
        {
            "run": target["labels"].get("job_id", ""),
            "node": target["labels"].get("node", ""),
            "address": target["labels"]["instance"],
            "up": target["health"] == "up",
            "error": target["lastError"],
        }
        for target in _get(url, "/api/v1/targets?state=active")["activeTargets"]
        if target["labels"]["job"] == JOB
    ]
    return sorted(targets, key=lambda target: (target["run"], target["node"].zfill(5), target["address"]))


def firing_alerts(url: str) -> list[dict[str, str]]:
    """Return the alerts of ddpctl that are firing or pending. Raises UnavailableError if Prometheus does not answer."""
    return [
        {
            "alert": alert["labels"]["alertname"],
            "state": alert["state"],
            "severity": alert["labels"].get("severity", ""),
            "run": alert["labels"].get("job_id", ""),
            "summary": alert["annotations"].get("summary", ""),
        }
        for alert in _get(url, "/api/v1/alerts")["alerts"]
        if alert["labels"]["alertname"].startswith("Ddp")
    ]


def _get(url: str, path: str) -> Any:
    try:
        with _open(url.rstrip("/") + path) as answer:
            return json.load(answer)["data"]
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "reason", None) or error
        raise UnavailableError(f"no Prometheus answers at {url!r}: {reason}") from None


def _open(url: str) -> Any:
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError("the address must begin with http:// or https://")
    direct = urllib.parse.urlsplit(url).hostname in _LOOPBACK
    handlers = [urllib.request.ProxyHandler({})] if direct else []  # the loopback address of a proxy is another machine
    return urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S)
