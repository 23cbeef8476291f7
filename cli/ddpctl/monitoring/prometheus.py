"""The configuration with which Prometheus finds and scrapes the runs, and a client of its HTTP API."""

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from ddpctl.errors import UnavailableError, UsageError
from ddpctl.monitoring.alerts import promql_duration
from ddpctl.text import quote
from ddpwire.machine import MAX_PORT

JOB = "ddp"
HEAD = """\
# Made by ddpctl monitor. It overwrites your edits.
# To use a Prometheus that you have, add rule_files and the entries of scrape_configs to its file.
"""
TIMEOUT_S = 5.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
