"""The alerts, the files that ``ddpctl monitor`` writes, and those from which a Prometheus learns where the runs are."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import ROOT
from tests.in_process import ddpctl
from tests.messages import assert_names
from tests.unit.ddpctl.expressions import ALERTS, RECORDINGS, faults
from tests.unit.ddpctl.records import run_of

from ddpctl.job.spec import JobSpec
from ddpctl.monitoring.prometheus import Limits, parse_limits, prometheus_rule, rule_groups
from ddpctl.operations import launcher
from ddpctl.runs.run_status import NodeReport, RunStatus
from ddpwire.run_files import NodeState

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="needs promtool (apt install prometheus)")


def test_every_alert_has_its_paragraph() -> None:
    """A heading is its name, and its anchor the end of runbook_url, as GitHub makes anchors."""
    text = (ROOT / "docs/alerts.md").read_text()
    parts = re.split(r"^## (Ddp\w+)\n", text, flags=re.M)[1:]
    written = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(written) == list(ALERTS)
    for name, paragraph in written.items():
        assert ALERTS[name].runbook.endswith(f"docs/alerts.md#{name.lower()}")
        assert len(paragraph.split()) > 40, f"{name}: what is one to do?"


@pytest.mark.parametrize("rule", [*RECORDINGS, *ALERTS.values()], ids=lambda rule: rule.name)
def test_an_alert_asks_only_for_series_of_the_catalogue(rule: Any) -> None:
    assert faults(rule.expr) == []


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_groups(parse_limits(["hold=0.5"])))
    assert PROMTOOL
    line = [PROMTOOL, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in done.stdout


def test_the_operators_rule_is_the_same() -> None:
    body = prometheus_rule(Limits()).split("\nspec:\n")[1]
    plain = rule_groups(Limits()).split("\n", 1)[1]
    assert "\n".join(line.removeprefix("  ") for line in body.split("\n")) == plain


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
    monkeypatch.setattr("ddpctl.commands.monitor.READY_S", 0)
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


def test_a_daemon_that_does_not_answer_is_named_before_a_file_is_written(
    compose: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpctl.commands.monitor.READY_S", 0)
    program = compose.parent / "bin" / "docker"
    program.write_text('#!/bin/sh\n[ "$1" != version ] || { echo "no daemon" >&2; exit 1; }\n')
    done = ddpctl("monitor", "up")
    assert done.returncode == 69
    assert_names(done.stderr, "no daemon")
    assert not Path(os.environ["DDPCTL_STATE_DIR"], ".monitoring").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "here --interval nan",
        "here --interval 0",
        "here --targets file",
        "file",
        "other",
        "--limit hold=x",
        "--exporter a",
    ],
)
def test_config_refuses_what_makes_no_sense_and_overwrites_no_file_of_others(arguments: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for name in ("file", "other/rules.yaml"):
        (tmp_path / name).touch()
    assert ddpctl("monitor", "config", *arguments.split(), cwd=tmp_path).returncode == 2
    assert (tmp_path / "other/rules.yaml").read_text() == ""
    assert not (tmp_path / "here").exists()
    assert ddpctl("monitor", "config", "other", "--force", cwd=tmp_path).returncode == 0


def node(number: int, metrics: str | None, *, alive: bool = True) -> NodeReport:
    state = NodeState(run="night", node=number, pid=1, state="training", started=0.0, metrics=metrics)
    return NodeReport(node=number, alive=alive, state=state, outcome=None)


TRAINING = RunStatus(
    run="night",
    state="training",
    message="",
    nodes=(node(0, "http://10.0.0.1:9500/metrics"), node(1, None), node(2, "http://10.0.0.3:9500/m", alive=False)),
)
ENDED = RunStatus(run="night", state="succeeded", message="")
RUN = run_of(kind="ssh", job=JobSpec(nodes="2"), handle={"logs": "x"})


def test_a_run_on_other_machines_is_a_target_while_it_lives(tmp_path: Path) -> None:
    path = tmp_path / ".targets" / "night.json"
    launcher.update_discovery(tmp_path, [(RUN, TRAINING)])
    assert json.loads(path.read_text()) == [
        {"targets": ["10.0.0.1:9500"], "labels": {"job_id": "night", "launcher": "ssh", "node": "0"}}
    ]
    assert path.stat().st_mode & 0o777 == 0o644
    written = path.stat().st_mtime_ns
    launcher.update_discovery(tmp_path, [(RUN, TRAINING)])
    assert path.stat().st_mtime_ns == written  # Prometheus need not read it again
    launcher.update_discovery(tmp_path, [(RUN, ENDED)])
    assert list(path.parent.iterdir()) == []


def test_a_table_of_the_fleet_has_a_row_for_each_run_and_no_column_for_the_name_of_a_series() -> None:
    tables = [panel for panel in json.loads(DASHBOARDS["fleet"])["panels"] if panel["type"] == "table"]
    queries = [target["expr"] for panel in tables for target in panel["targets"] if "ALERTS" not in target["expr"]]
    assert [
        query for query in queries if not query.startswith("max by (namespace, job_id, run_uid, user, project)")
    ] == []
    assert len(queries) > 3
