"""Where a run's metrics are, in the form of Prometheus' file_sd
(https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config): written while a run lives.

The files are in the folder ``.targets`` beside the runs' folders, one a run, or one a node where each writes its own.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

TARGETS = ".targets"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A node's endpoint, and the labels that Prometheus gives to all of its series."""

    url: str  # http://host:port/metrics
    job_id: str  # the run
    node: int
    launcher: str


def file_name(run: str, node: int | None = None) -> str:
    """The file of a run, or of one of its nodes."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", run)
    return f"{name}.json" if node is None else f"{name}.node-{node}.json"


def is_of(name: str, run: str) -> bool:
    """Whether a file is of this run."""
    return re.fullmatch(rf"{re.escape(file_name(run)[:-5])}(\.(node|job)-[0-9]+)?\.json", name) is not None


def text(targets: Iterable[Target]) -> str:
    """The content of such a file."""
    groups = [
        {
            "targets": [urlsplit(target.url).netloc],
            "labels": {"job_id": target.job_id, "launcher": target.launcher, "node": str(target.node)},
        }
        for target in targets
    ]
    return json.dumps(groups, indent=1) + "\n"
