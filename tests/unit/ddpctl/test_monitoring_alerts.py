"""The alerts: each asks for series of the catalogue and has its paragraph, promtool accepts them, and one fires."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.expressions import ALERTS, RECORDINGS, faults

from ddpctl.monitoring.alerts import Limits, parse_limits, prometheus_rule, rule_groups

ROOT = Path(__file__).parents[3]
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


def check_rules(test: dict[str, Any], folder: Path) -> None:
    """Run one test of the rules by promtool."""
    (folder / "rules.yaml").write_text(rule_groups(Limits()))
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(json.dumps(file))
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_groups(parse_limits(["hold=0.5"])))
    assert PROMTOOL
    line = [PROMTOOL, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in done.stdout


@needs_promtool
def test_an_alert_fires_while_no_step_is_taken_and_resolves(tmp_path: Path) -> None:
    """The cases of every alert are in tests/nightly."""
    labels = 'job="ddp",job_id="night",node="0",instance="10.0.0.1:9200"'
    fires = 'count(ALERTS{alertname="DdpStalledStep",alertstate="firing"})'
    samples = {5: [], 14: [], 18: [{"labels": "{}", "value": 1}], 23: []}
    test = {
        "interval": "1m",
        "input_series": [
            {"series": f'ddp_run_info{{{labels},run_id="night",run_uid="0a1b"}}', "values": "1x300"},
            {"series": f'ddp_job_state{{{labels},state="training"}}', "values": "1x300"},
            {
                "series": f'ddp_last_step_timestamp_seconds{{{labels},rank="0"}}',
                "values": "0+60x10 600x10 1320+60x10",
            },
        ],
        "promql_expr_test": [
            {"expr": fires, "eval_time": f"{minute}m", "exp_samples": expected} for minute, expected in samples.items()
        ],
    }
    check_rules(test, tmp_path)


def test_the_operators_rule_is_the_same() -> None:
    body = prometheus_rule(Limits()).split("\nspec:\n")[1]
    plain = rule_groups(Limits()).split("\n", 1)[1]
    assert "\n".join(line.removeprefix("  ") for line in body.split("\n")) == plain
