"""``ddpctl monitor``: what it writes, and what it says where something is missing or in the way."""

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
