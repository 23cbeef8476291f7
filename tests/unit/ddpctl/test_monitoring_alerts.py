"""The alerts: each asks for series of the catalogue and has its paragraph, promtool accepts them, and one fires."""

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
