"""The configuration of a Prometheus that scrapes the runs, by the files that ddpctl leaves for its file_sd."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddpctl.errors import UsageError
from ddpctl.monitoring.rule_files import dump, span
from ddpctl.words import quote

JOB = "ddp"
HEAD = """\
# Made by ddpctl monitor. For a Prometheus that you have: rule_files and the entries of scrape_configs.
"""


@dataclass(frozen=True, kw_only=True)
class Scraping:
    """What is scraped, and how often."""

    targets: str  # the folder of the file_sd files
    interval_s: float = 10.0
    exporters: tuple[tuple[str, int], ...] = ()  # what else the nodes' machines have: job name and port


def parse_exporters(settings: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """``node=9100``, ``dcgm=9400``. Raises UsageError."""
    found: dict[str, int] = {}
    for setting in settings:
        name, _, port = setting.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name == JOB or name in found:
            raise UsageError(f"--exporter: {quote(name)} is no name for it, or one that is taken: dcgm=9400")
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            raise UsageError(f"--exporter {name}: {quote(port)} is no port: 1 to 65535")
        found[name] = int(port)
    return tuple(found.items())


def prometheus_yml(scraping: Scraping) -> str:
    """The whole file; rules.yaml lies beside it."""
    interval = span(scraping.interval_s)
    jobs = [_job(JOB, scraping), *(_beside(name, port, scraping) for name, port in scraping.exporters)]
    return HEAD + dump(
        {
            "global": {"scrape_interval": interval, "evaluation_interval": interval},
            "rule_files": ["rules.yaml"],
            "scrape_configs": jobs,
        }
    )


def _job(name: str, scraping: Scraping) -> dict[str, Any]:
    files = {"files": [f"{scraping.targets}/*.json"], "refresh_interval": "30s"}  # a change is seen at once
    return {"job_name": name, "file_sd_configs": [files]}


def _beside(name: str, port: int, scraping: Scraping) -> dict[str, Any]:
    """Machines, not runs: once each, however many nodes of however many runs they have."""
    relabel = [
        {
            "source_labels": ["__address__"],
            "regex": r"(.+):\d+",
            "target_label": "__address__",
            "replacement": f"$1:{port}",
        },
        {"action": "labelkeep", "regex": "__.*|job"},
    ]
    return {**_job(name, scraping), "relabel_configs": relabel}
