"""A real Prometheus scrapes a real run of two nodes and two ranks each; promtool checks what they export."""

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.road.driver import ddpctl, node_log, wait_until

from ddpwire.catalogue import CATALOGUE

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (apt install prometheus)",
)
PATH = os.environ["PATH"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The addresses of a training that goes on."""
    monkeypatch.setenv("PATH", PATH)
    ddpctl("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", "scraped", "--", "--epochs", "2000")
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "scraped")), "the second epoch")
        reports = json.loads(ddpctl("status", "scraped", "--json").stdout)["node_reports"]
        yield [report["state"]["metrics"] for report in reports]
    finally:
        ddpctl("stop", "scraped", "--kill")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def test_promtool_accepts_every_nodes_metrics(run: list[str]) -> None:
    for address in run:
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=get(address), capture_output=True, text=True, timeout=30
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prometheus_has_every_series_of_every_rank(run: list[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    hosts = [urllib.parse.urlparse(address).netloc for address in run]
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "ddp", "static_configs": [{"targets": hosts}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    server = subprocess.Popen(
        [
            "prometheus",
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ]
    )

    def query(expression: str) -> list[dict[str, Any]]:
        answer = get(f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}")
        found: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return found

    def scraped() -> bool:
        try:
            return len(query("ddp_steps_total")) == 4
        except OSError:
            return False

    try:
        wait_until(scraped, "four ranks in Prometheus", timeout_s=30)
        assert {result["metric"]["rank"] for result in query("ddp_steps_total > 0")} == {"0", "1", "2", "3"}
        assert {result["metric"]["instance"] for result in query("ddp_ranks_alive == 2")} == set(hosts)
        for metric in CATALOGUE:
            name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
            assert query(name) or metric.needs_gpu, f"{metric.name} has no sample"
    finally:
        server.terminate()
        server.wait(20)
