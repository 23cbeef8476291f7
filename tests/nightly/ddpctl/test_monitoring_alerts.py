"""Every alert fires, stays silent and resolves, by promtool; and the pages list all that there is."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.nightly.ddpctl.alert_cases import CASES, HALF_A_DAY, INFO, RUN, SILENT_LIVES, WARNINGS, Case
from tests.unit.ddpctl.expressions import ALERTS, RECORDINGS, faults, names
from tests.unit.ddpctl.test_monitoring_alerts import PROMTOOL, ROOT, needs_promtool

from ddpctl.errors import UsageError
from ddpctl.monitoring.prometheus import Limits, parse_limits, rule_groups
from ddpwire.metrics import CHECKPOINT_LAST_SUCCESS, HEARTBEAT, LAST_STEP_TIME, OF_A_RANK, STEPS

PROMETHEUS = shutil.which("prometheus")
GUIDE = ROOT / "docs/monitoring.md"


def check_rules(test: dict[str, Any], folder: Path) -> None:
    """Run one test of the rules by promtool."""
    (folder / "rules.yaml").write_text(rule_groups(Limits()))
    file = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(json.dumps(file))
    assert PROMTOOL
    done = subprocess.run([PROMTOOL, "test", "rules", "test.yaml"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def expected(case: Case, minute: int) -> dict[str, Any]:
    """What promtool is to find of the case's alert in that minute."""
    alert = ALERTS[case.alert]
    severity = "warning" if case.alert in WARNINGS else "critical"
    annotations = {"summary": case.summary, "description": alert.description, "runbook_url": alert.runbook}
    labels = {"job_id": RUN["job_id"], **case.labels, "severity": severity}
    alerts = [{"exp_labels": labels, "exp_annotations": annotations}] if minute == case.firing else []
    return {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": alerts}


@needs_promtool
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}: {case.situation}")
def test_an_alert_fires_stays_silent_and_resolves(case: Case, tmp_path: Path) -> None:
    minutes = [*case.silent, case.firing, *([case.resolved] if case.resolved is not None else [])]
    test = {
        "interval": "1m",
        "input_series": [{"series": series, "values": values} for series, values in (*INFO, *case.series)],
        "alert_rule_test": [expected(case, minute) for minute in minutes],
    }
    check_rules(test, tmp_path)


@needs_promtool
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
    of_script = {metric.name for metric in (*OF_A_RANK, HEARTBEAT)}
    of_script |= {f"{name}{suffix}" for name in of_script for suffix in ("_sum", "_count")}
    recorded = {rule.name: names(rule.expr) for rule in RECORDINGS}
    of_rules = {
        name: {part for metric_name in names(rule.expr) for part in recorded.get(metric_name, {metric_name})}
        for name, rule in ALERTS.items()
    }
    rows = re.findall(r"^\| (?:a script|one|ddptrain).*\| (.*) \|$", (ROOT / "docs/alerts.md").read_text(), flags=re.M)
    alone, beats, steps, saves, everything = (set(re.findall(r"Ddp\w+", row)) - {"DdpNoFirstStep"} for row in rows)
    assert alone == {name for name, series in of_rules.items() if not series & of_script}
    assert beats == {name for name, series in of_rules.items() if series & of_script == {HEARTBEAT.name}}
    loop = {HEARTBEAT.name, STEPS.name, LAST_STEP_TIME.name}
    assert steps == {n for n, series in of_rules.items() if series & of_script and series & of_script <= loop} - beats
    assert saves == {name for name, series in of_rules.items() if CHECKPOINT_LAST_SUCCESS.name in series}
    assert not everything


def test_every_alert_has_a_case_in_which_it_resolves() -> None:
    assert {case.alert for case in CASES if case.silent and case.resolved is not None} == set(ALERTS)


def test_the_pages_list_every_limit_and_every_recording() -> None:
    text = (ROOT / "docs/alerts.md").read_text()
    for name, field in TypeAdapter(Limits).json_schema()["properties"].items():
        default = "each alert's own" if field["default"] is None else f"{field['default']:g}"
        assert f"| `{name}` | {default} | {field['description']} |\n" in text
    for rule in RECORDINGS:
        assert f"| `{rule.name}` | {rule.help} |\n" in text


def test_the_queries_of_the_guide_ask_for_what_the_catalogue_has() -> None:
    (block,) = re.findall(r"^```promql\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
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


def test_limits_reach_the_conditions() -> None:
    text = rule_groups(parse_limits(["checkpoint_age=7200", "hold=5"]))
    assert "run:ddp_checkpoint_age_seconds:min > 7200" in text
    assert set(re.findall(r"    for: (\w+)", text)) == {"5s"}
    assert set(re.findall(r"    for: (\w+)", rule_groups(parse_limits(["hold=0.5"])))) == {"500ms"}
    assert set(re.findall(r"    for: (\w+)", rule_groups(parse_limits(["hold=0"])))) == {"0s"}


@pytest.mark.parametrize("name", vars(Limits()))
def test_a_limit_that_no_rule_reads_is_noticed(name: str) -> None:
    other = 0.5 if name in ("data_share", "ettr") else 77
    assert rule_groups(parse_limits([f"{name}={other}"])) != rule_groups(Limits())


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [("skew", "a number"), ("data_share=2", "0 to 1"), ("ettr=nan", "0 to 1"), ("restarts=inf", "1 to 1000"),
     ("hold=soon", "a number"), ("hold=-1", "0 to 86400"), ("checkpoint_agee=1", "checkpoint_age'")],
)  # fmt: skip
def test_an_invalid_limit_is_refused_with_what_is_allowed(setting: str, allowed: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_limits([setting])
    assert (setting.partition("=")[0] in str(raised.value), allowed in str(raised.value)) == (True, True)


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
