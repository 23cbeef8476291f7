"""``ddpctl monitor``: what it writes, and what it says where something is missing or in the way."""

import json
import os
from pathlib import Path

import pytest
from tests.e2e.driver import ROOT
from tests.in_process import ddpctl

DASHBOARDS = {name: (ROOT / f"cli/ddpctl/monitoring/{name}.json").read_text() for name in ("run", "fleet")}


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_config_is_what_a_prometheus_and_a_grafana_read(tmp_path: Path) -> None:
    done = ddpctl("monitor", "config", "here", "--interval", "5", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    files = written(tmp_path / "here")
    targets = os.environ["DDPCTL_STATE_DIR"] + "/.targets"
    assert Path(targets).is_dir()  # else Prometheus does not see the files of the first run
    boxed = (ROOT / "docker/monitoring/prometheus.yml").read_text()
    assert files == {
        "prometheus.yml": boxed.replace("/targets/", f"{targets}/").replace("interval: 10s", "interval: 5s"),
        "rules.yaml": (ROOT / "docker/monitoring/rules.yaml").read_text(),
        **{f"dashboards/{name}.json": text for name, text in DASHBOARDS.items()},
    }


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker whose compose takes every command, and writes down which."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    calls = tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$PWD: $*" >>{calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return calls


def test_the_checked_in_box_and_the_written_one_are_the_same(compose: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder and the lines; tests/nightly/monitoring/test_monitor_box.py starts the real one."""
    monkeypatch.setattr("ddpctl.monitoring.stack.READY_S", 0)
    done = ddpctl("monitor", "up", "--port", "39090", "--grafana-port", "33000")
    state = Path(os.environ["DDPCTL_STATE_DIR"])
    box = state / ".monitoring"
    assert done.returncode == 69
    assert ("http://127.0.0.1:39090" in done.stderr, str(box) in done.stderr) == (True, True)
    files = written(box)
    env = dict(line.split("=", 1) for line in files.pop(".env").splitlines())
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
    assert files == checked_in | {f"dashboards/{name}.json": text for name, text in DASHBOARDS.items()}
    project = f"compose -p ddpctl-monitor-{os.getuid()} -f {box}/compose.yaml"
    *_, last = compose.read_text().splitlines()
    assert last == f"{box}: {project} up -d --force-recreate prometheus grafana"
    assert ddpctl("monitor", "down", "--forget").returncode == 0
    *_, last = compose.read_text().splitlines()
    assert last == f"{box}: {project} down --volumes"
    assert not box.exists()


def test_a_table_of_the_fleet_has_a_row_for_each_run_and_no_column_for_the_name_of_a_series() -> None:
    tables = [panel for panel in json.loads(DASHBOARDS["fleet"])["panels"] if panel["type"] == "table"]
    queries = [target["expr"] for panel in tables for target in panel["targets"] if "ALERTS" not in target["expr"]]
    assert [
        query for query in queries if not query.startswith("max by (namespace, job_id, run_uid, user, project)")
    ] == []
    assert len(queries) > 3
