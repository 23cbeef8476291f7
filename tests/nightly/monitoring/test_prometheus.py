"""A real Prometheus finds a real run of two nodes, two ranks each, by its file_sd; promtool checks what is told."""

import json
import os
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import PACED, ddpctl, node_log, wait_until

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (apt install prometheus)",
)
PATH = os.environ["PATH"]
RUN = "scraped"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The addresses of a training that continues."""
    monkeypatch.setenv("PATH", PATH)
    ddpctl("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", RUN, "--", str(PACED), "--epochs", "2000")
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, RUN)), "the second epoch", timeout_s=200)
        reports = json.loads(ddpctl("status", RUN, "--json").stdout)["node_reports"]
        yield [report["state"]["metrics"] for report in reports]
    finally:
        ddpctl("stop", RUN, "--kill")


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def checked(text: str) -> tuple[int, str, str]:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def series(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


class Prometheus:
    """A server that knows nothing but the folder of the targets."""

    def __init__(self, folder: Path, targets: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": "ddp", "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}]}
            ],
        }
        path = folder / "prometheus.yml"
        path.write_text(json.dumps(config))
        checked = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, timeout=60)
        assert checked.returncode == 0, checked.stderr
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={path}",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--log.level=error",
            ]
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now; none while the server does not answer."""
        try:
            answer = get(f"http://127.0.0.1:{self._port}/api/v1/query?query={urllib.parse.quote(expression)}")
        except OSError:
            return []
        found: list[dict[str, Any]] = json.loads(answer)["data"]["result"]
        return found


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, tmp_path / "runs" / ".targets")
    yield server
    server.process.terminate()
    server.process.wait(60)


def test_the_targets_of_nodes_that_were_killed_are_taken_away_by_the_next_look(run: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ".targets"
    for report in json.loads(ddpctl("status", RUN, "--json").stdout)["node_reports"]:
        os.kill(report["state"]["pid"], 9)
    assert sorted(path.name for path in folder.iterdir()) == [f"{RUN}.node-0.json", f"{RUN}.node-1.json"]
    wait_until(lambda: json.loads(ddpctl("status", RUN, "--json").stdout)["state"] == "lost", "the loss")
    assert list(folder.iterdir()) == []
