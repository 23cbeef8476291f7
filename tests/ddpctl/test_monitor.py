"""``ddpctl monitor``: what it writes, and what it says where something is missing or in the way."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from tests.ddpctl.kubernetes_judges import faults
from tests.road.driver import ROOT, ddpctl

from ddpctl.monitoring.prometheus import Scraping, parse_exporters, prometheus_yml

DASHBOARDS = {name: (ROOT / f"cli/ddpctl/monitoring/{name}.json").read_text() for name in ("run", "fleet")}


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_config_is_what_a_prometheus_and_a_grafana_read(tmp_path: Path) -> None:
    done = ddpctl("monitor", "config", "here", "--interval", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    found = written(tmp_path / "here")
    targets = os.environ["DDPCTL_STATE_DIR"] + "/.targets"
    boxed = (ROOT / "docker/monitoring/prometheus.yml").read_text()
    assert found == {
        "prometheus.yml": boxed.replace("/targets/", f"{targets}/").replace("interval: 10s", "interval: 5s"),
        "rules.yaml": (ROOT / "docker/monitoring/rules.yaml").read_text(),
        **{f"dashboards/{name}.json": text for name, text in DASHBOARDS.items()},
    }


def test_config_can_be_written_again_but_not_over_somebodys_own(tmp_path: Path) -> None:
    for _ in range(2):
        assert ddpctl("monitor", "config", cwd=tmp_path).returncode == 0
    own = tmp_path / "monitoring" / "prometheus.yml"
    own.write_text("scrape_configs: []\n")
    before = written(tmp_path)
    done = ddpctl("monitor", "config", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "ddpctl: monitoring/prometheus.yml is not ddpctl's: --force writes over it, or name another folder\n",
    )
    assert written(tmp_path) == before
    assert ddpctl("monitor", "config", "--force", cwd=tmp_path).returncode == 0
    assert own.read_text().startswith("# Made by ddpctl monitor.")


def test_a_cluster_gets_its_rules_and_dashboards_as_objects() -> None:
    done = ddpctl("monitor", "config", "--kubernetes", "--limit", "skew=3")
    assert done.returncode == 0, done.stderr
    rules, run, fleet = yaml.safe_load_all(done.stdout)
    assert (rules["kind"], rules["metadata"]["name"]) == ("PrometheusRule", "ddpctl")
    assert "> 3)" in json.dumps(rules)
    for thing, name in ((run, "run"), (fleet, "fleet")):
        assert faults(thing) == []
        assert thing["metadata"]["labels"] == {"grafana_dashboard": "1"}
        assert thing["data"] == {f"ddpctl-{name}.json": DASHBOARDS[name]}


def test_machines_are_scraped_once_by_an_exporters_port() -> None:
    config = yaml.safe_load(
        prometheus_yml(Scraping(targets="/t", exporters=parse_exporters(["node=9100", "dcgm=9400"])))
    )
    runs, node, dcgm = config["scrape_configs"]
    assert [job["job_name"] for job in (runs, node, dcgm)] == ["ddp", "node", "dcgm"]
    address, rest = dcgm["relabel_configs"]
    assert (address["target_label"], address["replacement"]) == ("__address__", "$1:9400")
    assert rest == {"action": "labelkeep", "regex": "__.*|job"}  # alike for every node of a machine: one target


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (
            ("config", "--exporter", "ddp=9100"),
            2,
            "--exporter: 'ddp' is no name for it, or one that is taken: dcgm=9400",
        ),
        (("config", "--exporter", "dcgm=94000"), 2, "--exporter dcgm: '94000' is no port: 1 to 65535"),
        (("config", "--limit", "skew=0"), 2, "--limit skew: '0' is not allowed: a number from 1 to 100"),
        (("config", "--limit", "skew=1e300"), 2, "--limit skew: '1e300' is not allowed: a number from 1 to 100"),
        (
            ("config", "--limit", "heartbeat=nan"),
            2,
            "--limit heartbeat: 'nan' is not allowed: a number from 1 to 2592000",
        ),
        (("config", "--interval", "inf"), 2, "--interval: inf is not allowed: seconds from 0.1 to 3600"),
        (("config", "--interval", "nan"), 2, "--interval: nan is not allowed: seconds from 0.1 to 3600"),
        (("config", "t.py"), 2, "t.py is a file: name the folder that the configuration is to be written into"),
        (
            ("config", "--targets", "t.py"),
            2,
            "--targets: t.py is a file: name the folder that the runs' file_sd files are in",
        ),
        (("up", "--retention", "long"), 2, "--retention: 'long' is no span: a number and h, d, w or y, such as 30d"),
        (
            ("up",),
            69,
            "monitor up needs docker compose, and there is none: install it, or: "
            "ddpctl monitor config writes the configuration for a Prometheus that you have",
        ),
        (
            ("status",),
            69,
            "no Prometheus was started here: ddpctl monitor up starts one, --url names yours",
        ),
        (
            ("status", "--url", "http://127.0.0.1:1"),
            69,
            "no Prometheus answers at http://127.0.0.1:1: [Errno 111] Connection refused",
        ),
        (
            ("status", "--url", "here"),
            69,
            "no Prometheus answers at here: an address begins with http:// or https://",
        ),
        (("config", "/proc/no"), 73, "cannot write /proc/no/prometheus.yml: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors(words: tuple[str, ...], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    done = ddpctl("monitor", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"ddpctl: {said}\n")
    assert written(tmp_path) == {"t.py": ""}


def test_nothing_to_stop() -> None:
    done = ddpctl("monitor", "down")
    assert (done.returncode, done.stderr) == (0, "nothing to stop: ddpctl monitor up starts it\n")


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker whose compose takes every command, and writes down which."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    said = tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$PWD: $*" >>{said}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return said


def test_up_refuses_a_port_at_which_somebody_answers(compose: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = ddpctl("monitor", "up", "--port", str(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
    url = f"http://127.0.0.1:{server.server_port}"
    assert (done.returncode, done.stderr) == (
        2,
        f"ddpctl: --port: something else answers at {url} already: name another port\n",
    )
    assert " up " not in compose.read_text()


def test_the_checked_in_box_and_the_written_one_are_the_same(compose: Path) -> None:
    """The folder and the lines; tests/cluster/test_monitor_box.py starts the real one."""
    code = "import sys; from ddpctl import monitor; monitor.READY_S = 0; from ddpctl.main import main; main()"
    argv = [sys.executable, "-c", code, "monitor", "up", "--port", "39090", "--grafana-port", "33000"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    state = Path(os.environ["DDPCTL_STATE_DIR"])
    box = state / ".monitoring"
    assert (done.returncode, done.stderr) == (
        69,
        "ddpctl: prometheus does not answer at http://127.0.0.1:39090 after 0 s: "
        f"docker compose logs prometheus in {box} says why\n",
    )
    found = written(box)
    env = dict(line.split("=", 1) for line in found.pop(".env").splitlines())
    assert env == {
        "TARGETS": f"{state}/.targets",
        "OWNER": f"{os.getuid()}:{os.getgid()}",
        "PROMETHEUS_PORT": "39090",
        "GRAFANA_PORT": "33000",
        "RETENTION": "30d",
        "DASHBOARDS": f"{box}/dashboards",
        "PROMETHEUS_DATA": f"{box}/data/prometheus",
        "GRAFANA_DATA": f"{box}/data/grafana",
    }
    assert (state / ".targets").is_dir()
    checked_in = written(ROOT / "docker" / "monitoring")
    assert found == checked_in | {f"dashboards/{name}.json": text for name, text in DASHBOARDS.items()}
    project = f"compose -p ddpctl-monitor-{os.getuid()} -f {box}/compose.yaml"
    *_, last = compose.read_text().splitlines()
    assert last == f"{box}: {project} up -d --force-recreate prometheus grafana"
    assert ddpctl("monitor", "down", "--forget").returncode == 0
    *_, last = compose.read_text().splitlines()
    assert last == f"{box}: {project} down --volumes"
    assert not box.exists()
