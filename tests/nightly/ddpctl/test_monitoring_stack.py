"""``ddpctl monitor``: what it writes, and what it says where something is missing or in the way."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from tests.in_process import ddpctl
from tests.unit.ddpctl.kubernetes_judges import faults
from tests.unit.ddpctl.test_monitoring_alerts import DASHBOARDS, written
from tests.unit.ddpctl.test_monitoring_alerts import compose as compose

from ddpctl.commands.monitor import MARK
from ddpctl.monitoring.prometheus import Scraping, parse_exporters, prometheus_yml


def test_config_can_be_written_again_but_not_over_somebodys_own(tmp_path: Path) -> None:
    for _ in range(2):
        assert ddpctl("monitor", "config", cwd=tmp_path).returncode == 0
    for name in ("rules.yaml", "dashboards/run.json", "dashboards/fleet.json", "prometheus.yml"):
        own = tmp_path / "monitoring" / name
        own.write_text("{}\n")
        before = written(tmp_path)
        done = ddpctl("monitor", "config", cwd=tmp_path)
        assert (done.returncode, str(Path("monitoring", name)) in done.stderr) == (2, True)
        assert written(tmp_path) == before
        if name != "prometheus.yml":
            own.write_text(f"# {MARK.decode()}")
    assert "--force" in done.stderr
    assert ddpctl("monitor", "config", "--force", cwd=tmp_path).returncode == 0
    assert own.read_text().startswith("# Made by ddpctl monitor.")


def test_machines_are_scraped_once_by_an_exporters_port() -> None:
    config = yaml.safe_load(
        prometheus_yml(Scraping(targets="/t", exporters=parse_exporters(["node=9100", "dcgm=9400"])))
    )
    runs, node, dcgm = config["scrape_configs"]
    assert [job["job_name"] for job in (runs, node, dcgm)] == ["ddp", "node", "dcgm"]
    address, rest = dcgm["relabel_configs"]
    assert (address["target_label"], address["replacement"]) == ("__address__", "$1:9400")
    assert rest == {"action": "labelkeep", "regex": "__.*|job"}  # alike for every node of a machine: one target


def test_up_refuses_a_port_at_which_somebody_answers(compose: Path) -> None:
    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        done = ddpctl("monitor", "up", "--port", str(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    assert f"http://127.0.0.1:{server.server_port}" in done.stderr
    assert " up " not in compose.read_text()


@pytest.mark.parametrize("verb", ["up", "down"])
def test_without_a_docker_daemon_nothing_is_written(verb: str, tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n[ $1 = compose ] || { echo 'cannot connect to the daemon' >&2; exit 1; }\n")
    docker.chmod(0o755)
    state = tmp_path / "state"
    if verb == "down":
        (state / ".monitoring").mkdir(parents=True)
        (state / ".monitoring/compose.yaml").touch()
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DDPCTL_STATE_DIR": str(state)}
    done = ddpctl("monitor", verb, **env)
    assert done.returncode == 69
    assert "cannot connect to the daemon" in done.stderr
    assert written(tmp_path) == {
        "docker": docker.read_text(),
        **({"state/.monitoring/compose.yaml": ""} if verb == "down" else {}),
    }


def test_a_cluster_gets_its_rules_and_dashboards_as_objects() -> None:
    done = ddpctl("monitor", "config", "--kubernetes", "--limit", "skew=3")
    assert done.returncode == 0, done.stderr
    rules, run, fleet = yaml.safe_load_all(done.stdout)
    assert (rules["kind"], rules["metadata"]["name"]) == ("PrometheusRule", "ddpctl")
    assert "> 3" in json.dumps(rules)
    for thing, name in ((run, "run"), (fleet, "fleet")):
        assert faults(thing) == []
        assert thing["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert thing["data"] == {f"ddpctl-{name}.json": DASHBOARDS[name]}


@pytest.mark.parametrize(
    ("command", "code", "cause"),
    [
        ("config --exporter ddp=9100", 2, "--exporter: 'ddp'"),
        ("config --exporter dcgm=94000", 2, "--exporter dcgm: '94000'"),
        ("config --limit skew=0", 2, "--limit skew: 0 "),
        ("config --interval nan", 2, "--interval: nan"),
        ("config t.py", 2, "t.py"),
        ("config --targets t.py", 2, "--targets: t.py"),
        ("up --retention long", 2, "--retention: 'long'"),
        ("up", 69, "docker compose"),
        ("status", 69, "--url"),
        ("status --url http://127.0.0.1:1", 69, "'http://127.0.0.1:1'"),
        ("status --url here", 69, "'here'"),
        ("config /proc/no", 73, "/proc/no/prometheus.yml"),
    ],
)
def test_an_error_of_monitor_is_one_line_that_names_its_cause(
    command: str, code: int, cause: str, tmp_path: Path
) -> None:
    (tmp_path / "t.py").touch()
    done = ddpctl("monitor", *command.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert cause in done.stderr
    assert written(tmp_path) == {"t.py": ""}


def test_monitor_down_without_a_monitor_is_no_error() -> None:
    done = ddpctl("monitor", "down")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (0, "", 1)
