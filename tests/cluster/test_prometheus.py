"""A real Prometheus with the configuration of ``ddpctl monitor config`` finds a run of two nodes of two ranks.

It has every series of the catalogue and data for every expression of the dashboards; a hang fires an alert.
"""

import json
import os
import re
import signal
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus_lab import MISSING, Lab, get, prometheus
from tests.e2e.driver import PACED, ddpctl, node_log, wait_until
from tests.unit.ddpctl.expressions import ALERTS, RECORDINGS, names, plain, selectors_of
from tests.unit.repository.test_dashboards import expressions

from ddpctl.monitoring.prometheus import DASHBOARDS
from ddpwire.metrics import CATALOGUE

pytestmark = [pytest.mark.skipif(MISSING != "", reason=MISSING), pytest.mark.timeout(1800)]
PATH = os.environ["PATH"]
RUN = "night"
NEED_A_GPU = {metric.name for metric in CATALOGUE if metric.needs_gpu}
NEED_A_FAULT = {"ALERTS"}  # there only while something is wrong
# As a person would shorten them, for trying out: every condition fires at once, and after seconds.
QUICK = ("hold=0", "stalled_step=8", "heartbeat=8", "checkpoint_age=30")
FIRES_S = 90.0  # on a busy machine


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lab]:
    """Prometheus with limits of seconds, and the run that it scrapes."""
    monkeypatch.setenv("PATH", PATH)
    limits = [word for limit in QUICK for word in ("--limit", limit)]
    with prometheus(tmp_path / "monitoring", "--interval", "1", *limits) as made:
        place = ("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", RUN, "-e", f"SLOW={tmp_path}/slow")
        launched = ddpctl(*place, "--", str(PACED), "--epochs", "200", "--device", "cpu")  # 15 minutes
        assert launched.returncode == 0, launched.stderr
        try:
            wait_until(lambda: re.search(r"epoch\s+2/|exit", node_log(tmp_path, RUN)), "the second epoch", 120)
            assert re.search(r"epoch\s+2/", node_log(tmp_path, RUN)), node_log(tmp_path, RUN)
            wait_until(lambda: len(made.query("ddp_steps_total > 0")) == 4, "four ranks in Prometheus", 120)
            yield made
        finally:
            ddpctl("stop", RUN, "--kill")


def nodes() -> list[dict[str, Any]]:
    reports = json.loads(ddpctl("status", RUN, "--json").stdout)["node_reports"]
    return [report["state"] for report in reports]


def check_with_promtool(text: str) -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def check_catalogue(lab: Lab, pages: list[str]) -> None:
    """Every metric has its series, labels and ranks, as far as this machine has them; promtool accepts the pages."""
    for metric in CATALOGUE:
        series = lab.query(f"{metric.name}_count" if metric.kind == "histogram" else metric.name)
        assert series or metric.needs_gpu, f"{metric.name} has no sample"
        if metric.set_by == "ddptrain" and not metric.needs_gpu:
            ranks = {sample["metric"]["rank"] for sample in series}
            assert ranks == ({"0"} if metric.by_rank_0 else {"0", "1", "2", "3"})
        for label, values in metric.labels.items():
            assert not values or {sample["metric"][label] for sample in series} <= set(values)
    for rank in range(4):
        assert 0 < int(lab.query(f'count({{rank="{rank}", __name__=~"ddp_.*"}})')[0]["value"][1]) <= 80
    for page in pages:
        check_with_promtool(page)
        assert sum(not line.startswith("#") and 'rank="' not in line for line in page.splitlines()) <= 120


def check_expressions(lab: Lab) -> None:
    """Dashboards, recording rules and alerts have data in a healthy run; but for what needs a GPU or a fault."""
    wait_until(lambda: lab.query("run:ddp_productive:ratio1h and on () ddp_loss"), "the rules' first results")
    wait_until(lambda: lab.query("rate(ddp_checkpoint_duration_seconds_count[5m]) > 0"), "a checkpoint to be seen")
    empty = [
        expr
        for board in DASHBOARDS
        for expr in expressions(board)
        if not names(expr) & (NEED_A_GPU | NEED_A_FAULT) and not lab.query(plain(expr))
    ]
    assert ["increase(ddp_restarts_total" in expr for expr in empty] == [True]  # the lines across the panels
    for rule in RECORDINGS:
        assert lab.query(rule.name), f"{rule.name} has no data"
    for alert in ALERTS.values():
        lab.query(alert.expr)  # a condition: with data while it is true
        for part in selectors_of(alert.expr):
            assert lab.query(part), f"{alert.name}: {part} has no data"


def test_run_is_found_measured_and_alerted_on_until_it_ends(lab: Lab, tmp_path: Path) -> None:
    wait_until(lambda: len(lab.query("ddp_eval_accuracy_ratio")) == 1, "the accuracy in Prometheus", 120)
    urls = [node["metrics"] for node in nodes()]
    labels = ("instance", "job_id", "launcher", "node")
    targets = sorted(tuple(up["metric"][label] for label in labels) for up in lab.query("ddp_ranks_alive == 2"))
    assert targets == sorted((urllib.parse.urlparse(url).netloc, RUN, "local", str(n)) for n, url in enumerate(urls))
    check_expressions(lab)
    pages = [get(url) for url in urls]
    check_catalogue(lab, pages)

    (rank_1,) = (rank["pid"] for rank in nodes()[0]["ranks"] if rank["rank"] == 1)
    os.kill(rank_1, signal.SIGSTOP)
    wait_until(lambda: {"DdpStalledStep", "DdpHeartbeatMissing"} <= lab.firing().keys(), "alerts on a hang", FIRES_S)
    alert = lab.firing()["DdpStalledStep"]
    assert (alert["job_id"], RUN in alert["summary"]) == (RUN, True)
    assert "DdpStalledStep" in ddpctl("monitor", "status", "--url", lab.url).stdout
    os.kill(rank_1, signal.SIGCONT)
    wait_until(lambda: "DdpStalledStep" not in lab.firing(), "the alert to resolve", FIRES_S)

    ddpctl("stop", RUN)
    assert list((tmp_path / "runs" / ".targets").iterdir()) == []
    for node, page in enumerate(pages):
        kept = (tmp_path / "runs" / RUN / f"node-{node}" / "metrics.prom").read_text()
        check_with_promtool(kept)
        series = {re.split(r"[{ ]", line)[0] for line in page.splitlines() if not line.startswith("#")}
        series -= {"ddp_heartbeat_timestamp_seconds"}  # a rank that has ended has none
        assert series <= {re.split(r"[{ ]", line)[0] for line in kept.splitlines()}
    wait_until(lambda: lab.query("up") == [], "Prometheus without the run", 120)
