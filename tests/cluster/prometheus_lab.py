"""A real Prometheus with the configuration that ``ddpctl monitor config`` writes, and what it answers."""

import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import yaml
from tests.e2e.driver import ddpctl, wait_until

MISSING = (
    ""
    if shutil.which("prometheus") and shutil.which("promtool")
    else "needs prometheus and promtool (apt install prometheus)"
)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310
        text: str = answer.read().decode()
    return text


def serve(*argv: str, log: IO[str] | None = None) -> subprocess.Popen[bytes]:
    """A server that ends with the tests."""
    return subprocess.Popen(["setpriv", "--pdeathsig=TERM", *argv], stdout=log, stderr=log)


class Lab:
    """A Prometheus that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        series = json.loads(get(f"{self.url}/api/v1/query?query={urllib.parse.quote(expression)}"))
        result = series["data"]["result"]
        if series["data"]["resultType"] == "scalar":
            return [{"metric": {}, "value": result}]
        assert isinstance(result, list)
        return result

    def firing(self) -> dict[str, dict[str, str]]:
        """The labels and the summary of what fires, by the alert's name."""
        alerts = json.loads(get(f"{self.url}/api/v1/alerts"))["data"]["alerts"]
        return {
            entry["labels"]["alertname"]: {**entry["labels"], "summary": entry["annotations"]["summary"]}
            for entry in alerts
            if entry["state"] == "firing"
        }

    def ready(self) -> bool:
        try:
            return get(f"{self.url}/-/ready") != ""
        except OSError:
            return False


@contextlib.contextmanager
def prometheus(folder: Path, *flags: str, more_targets: tuple[Path, ...] = ()) -> Iterator[Lab]:
    """One whose configuration ddpctl wrote with these flags; promtool has looked at it.

    ``more_targets``: folders of other users' runs.
    """
    done = ddpctl("monitor", "config", str(folder), *flags)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    for targets in more_targets:
        config["scrape_configs"][0]["file_sd_configs"][0]["files"].append(f"{targets}/*.json")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    check = ["promtool", "check", "config", f"{folder}/prometheus.yml"]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (folder / "prometheus.log").open("w") as log:
        options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
        server = serve("prometheus", *options, f"--web.listen-address=127.0.0.1:{port}", log=log)
    try:
        lab = Lab(f"http://127.0.0.1:{port}")
        wait_until(lambda: server.poll() is not None or lab.ready(), "Prometheus", timeout_s=60)
        assert server.poll() is None, (folder / "prometheus.log").read_text()
        yield lab
    finally:
        server.terminate()
        server.wait(30)
