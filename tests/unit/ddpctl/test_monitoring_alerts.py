"""Each alert fires, stays silent and resolves, by promtool; has its paragraph; and asks for what the catalogue has."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.alert_cases import CASES, HALF_A_DAY, INFO, RUN, SILENT_LIVES, WARNINGS, Case
from tests.unit.ddpctl.expressions import faults, names

from ddpctl.errors import UsageError
from ddpctl.monitoring.alerts import RECORDINGS, Limits, alerts, parse_limits, prometheus_rule, rule_groups
from ddpctl.schema import fields_of
from ddpwire.metrics import CHECKPOINT_LAST_SUCCESS, HEARTBEAT, LAST_STEP_TIME, OF_A_RANK, STEPS

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/monitoring.md"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
ALERTS = {alert.name: alert for alert in alerts(Limits())}
needs_promtool = pytest.mark.skipif(not PROMTOOL, reason="needs promtool (apt install prometheus)")


def expected(case: Case, minute: int) -> dict[str, Any]:
    """What promtool is to find of the case's alert in that minute."""
    alert = ALERTS[case.alert]
    severity = "warning" if case.alert in WARNINGS else "critical"
    said = {"summary": case.summary, "description": alert.description, "runbook_url": alert.runbook}
    labels = {"job_id": RUN["job_id"], **case.labels, "severity": severity}
    found = [{"exp_labels": labels, "exp_annotations": said}] if minute == case.firing else []
    return {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": found}


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.what}")
def test_an_alert_fires_stays_silent_and_resolves(case: Case, tmp_path: Path) -> None:
    minutes = [*case.silent, case.firing, *([case.resolved] if case.resolved is not None else [])]
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in (*INFO, *case.series)],
        "alert_rule_test": [expected(case, minute) for minute in minutes],
    }
    check_rules(test, tmp_path)


def check_rules(test: dict[str, Any], folder: Path) -> None:
    """One test by promtool."""
    (folder / "rules.yaml").write_text(rule_groups(Limits()))
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(json.dumps(file))
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.e2e
@pytest.mark.parametrize("life", SILENT_LIVES)
def test_no_alert_fires_in_half_a_day_of_a_script_that_reports_little(life: str, tmp_path: Path) -> None:
    """In no minute of it, each alert by itself."""
    fired = 'count_over_time(ALERTS{{alertname="{}", alertstate="firing"}}[{}m])'
    times = {"eval_time": f"{HALF_A_DAY}m", "exp_samples": []}
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in SILENT_LIVES[life]],
        "promql_expr_test": [{"expr": fired.format(alert, HALF_A_DAY), **times} for alert in ALERTS],
    }
    check_rules(test, tmp_path)


def test_the_page_says_which_alerts_judge_a_script_that_tells_nothing() -> None:
    """Those that ask ddprun alone; DdpNoFirstStep does so in part."""
    told = {metric.name for metric in (*OF_A_RANK, HEARTBEAT)}
    told |= {f"{name}{suffix}" for name in told for suffix in ("_sum", "_count")}
    recorded = {rule.name: names(rule.expr) for rule in RECORDINGS}
    asked = {
        name: {part for one in names(rule.expr) for part in recorded.get(one, {one})} for name, rule in ALERTS.items()
    }
    rows = re.findall(r"^\| (?:a script|one|ddptrain).*\| (.*) \|$", (ROOT / "docs/alerts.md").read_text(), flags=re.M)
    alone, beats, steps, saves, everything = (set(re.findall(r"Ddp\w+", row)) - {"DdpNoFirstStep"} for row in rows)
    assert alone == {name for name, series in asked.items() if not series & told}
    assert beats == {name for name, series in asked.items() if series & told == {HEARTBEAT.name}}
    loop = {HEARTBEAT.name, STEPS.name, LAST_STEP_TIME.name}
    assert steps == {n for n, series in asked.items() if series & told and series & told <= loop} - beats
    assert saves == {name for name, series in asked.items() if CHECKPOINT_LAST_SUCCESS.name in series}
    assert not everything


def test_every_alert_has_a_case_in_which_it_resolves() -> None:
    assert {case.alert for case in CASES if case.silent and case.resolved is not None} == set(ALERTS)


def test_every_alert_has_its_paragraph() -> None:
    """A heading is its name, and its anchor the end of runbook_url, as GitHub makes anchors."""
    text = (ROOT / "docs/alerts.md").read_text()
    parts = re.split(r"^## (Ddp\w+)\n", text, flags=re.M)[1:]
    written = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(written) == list(ALERTS)
    for name, paragraph in written.items():
        assert ALERTS[name].runbook.endswith(f"docs/alerts.md#{name.lower()}")
        assert len(paragraph.split()) > 40, f"{name}: what is one to do?"


def test_the_pages_list_every_limit_and_every_recording() -> None:
    text = (ROOT / "docs/alerts.md").read_text()
    for name, field in fields_of(Limits).items():
        default = "each alert's own" if field.default is None else f"{field.default:g}"
        assert f"| `{name}` | {default} | {field.doc} |\n" in text
    recorded = (ROOT / "docs/scraping.md").read_text()
    for rule in RECORDINGS:
        assert f"| `{rule.name}` | {rule.help} |\n" in recorded


def test_the_queries_of_the_guide_ask_for_what_the_catalogue_has() -> None:
    (block,) = re.findall(r"^```promql\n(.*?)^```$", (ROOT / "docs/scraping.md").read_text(), re.M | re.S)
    queries = [line for line in block.splitlines() if not line.startswith("#")]
    assert [faults(query) for query in queries] == [[]] * 4


@pytest.mark.skipif(not (PROMETHEUS and PROMTOOL), reason="needs prometheus and promtool (apt install prometheus)")
def test_prometheus_has_the_flags_of_the_guide_and_its_scrape_jobs_are_valid(tmp_path: Path) -> None:
    blocks = dict(re.findall(r"^```(\w+)\n(prometheus .*?|- \{.*?)^```$", GUIDE.read_text(), re.M | re.S))
    assert PROMETHEUS
    assert PROMTOOL
    done = subprocess.run([PROMETHEUS, "--help"], capture_output=True, text=True)
    for flag in re.findall(r"--[\w.-]+", blocks["sh"]):
        assert f"{flag}=" in done.stdout + done.stderr
    (tmp_path / "prometheus.yml").write_text(f"scrape_configs:\n{blocks['yaml']}")
    done = subprocess.run(
        [PROMTOOL, "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rule", [*RECORDINGS, *ALERTS.values()], ids=lambda rule: rule.name)
def test_an_alert_asks_only_for_series_of_the_catalogue(rule: Any) -> None:
    assert faults(rule.expr) == []


@needs_promtool
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(rule_groups(Limits()))
    assert PROMTOOL
    line = [PROMTOOL, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RECORDINGS) + len(ALERTS)} rules found" in done.stdout


def test_the_operators_rule_is_the_same() -> None:
    body = prometheus_rule(Limits()).split("\nspec:\n")[1]
    plain = rule_groups(Limits()).split("\n", 1)[1]
    assert "\n".join(line.removeprefix("  ") for line in body.split("\n")) == plain


def test_limits_reach_the_conditions() -> None:
    text = rule_groups(parse_limits(["checkpoint_age=7200", "hold=5"]))
    assert "run:ddp_checkpoint_age_seconds:min > 7200" in text
    assert set(re.findall(r"    for: (\w+)", text)) == {"5s"}
    assert set(re.findall(r"    for: (\w+)", rule_groups(parse_limits(["hold=0.5"])))) == {"500ms"}
    assert "    for: " not in rule_groups(parse_limits(["hold=0"]))


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("skew", "1 to 100"), ("data_share=2", "0 to 1"), ("ettr=nan", "0 to 1"), ("restarts=inf", "1 to 1000"),
     ("hold=soon", "0 to 86400"), ("checkpoint_agee=1", "checkpoint_age'")],
)  # fmt: skip
def test_an_invalid_limit_is_refused_with_what_is_allowed(setting: str, allowed: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_limits([setting])
    assert (setting.partition("=")[0] in str(raised.value), allowed in str(raised.value)) == (True, True)
