"""A real Prometheus, as ddpctl configures it, sees a run of two nodes of two ranks, and the faults it is given."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.prometheus_lab import MISSING, Lab, prometheus
from tests.ddpctl.expressions import names, plain, selectors_of
from tests.e2e.driver import ddpctl, node_log, wait_until
from tests.test_dashboards import expressions

from ddpctl.monitoring.alerts import RECORDINGS, Limits, alerts
from ddpctl.monitoring.stack import DASHBOARDS
from ddpwire.metrics import CATALOGUE

pytestmark = [pytest.mark.skipif(MISSING != "", reason=MISSING), pytest.mark.timeout(600)]
PATH = os.environ["PATH"]
SCRIPT = Path(__file__).parent / "scripts" / "paced.py"
NEED_A_GPU = {metric.name for metric in CATALOGUE if metric.needs_gpu}
NEED_A_FAULT = {"ALERTS"}  # there only while something is wrong
# As a person would shorten them, for trying out: every condition fires at once, and after seconds.
QUICK = ("hold=0", "stalled_step=8", "heartbeat=8", "checkpoint_age=12", "skew=2")
FIRES_S = 90.0  # on a busy machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lab]:
    """Prometheus with limits of seconds, and the run ``night`` that it scrapes."""
    monkeypatch.setenv("PATH", PATH)
    limits = [word for limit in QUICK for word in ("--limit", limit)]
    with prometheus(tmp_path / "monitoring", "--interval", "0.5", *limits) as lab:
        slow = f"SLOW={tmp_path}/slow"
        args = ("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", "night", "-e", slow, "--", str(SCRIPT))
        done = ddpctl(*args, "--epochs", "5000", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        try:
            wait_until(lambda: re.search(r"epoch\s+2/|exit", node_log(tmp_path, "night")), "the second epoch", 120)
            assert re.search(r"epoch\s+2/", node_log(tmp_path, "night")), node_log(tmp_path, "night")
            wait_until(lambda: len(lab.query("ddp_steps_total")) == 4, "four ranks in Prometheus")
            yield lab
        finally:
            ddpctl("stop", "night", "--kill")


def nodes() -> list[dict[str, Any]]:
    found = json.loads(ddpctl("status", "night", "--json").stdout)["node_reports"]
    return [report["state"] for report in found]


def rank_pid(rank: int) -> int:
    (pid,) = (one["pid"] for node in nodes() for one in node["ranks"] if one["rank"] == rank)
    return int(pid)


def test_every_expression_has_data(quick: Lab) -> None:
    """In a healthy run; but for what needs a GPU or a fault, which are named."""
    wait_until(lambda: quick.query("run:ddp_productive:ratio1h and on () ddp_loss"), "the rules' first results")
    wait_until(lambda: quick.query("rate(ddp_checkpoint_duration_seconds_count[5m]) > 0"), "a checkpoint to be seen")
    empty = {}
    for board in DASHBOARDS:
        for expr in expressions(board):
            if not names(expr) & (NEED_A_GPU | NEED_A_FAULT) and not quick.query(plain(expr)):
                empty[expr] = board
    restarts = [expr for expr in empty if "increase(ddp_restarts_total" in expr]  # the lines across the panels
    assert set(empty) == set(restarts)
    assert len(restarts) == 1
    for rule in RECORDINGS:
        assert quick.query(rule.name), f"{rule.name} has no data"
    for alert in alerts(Limits()):
        quick.query(alert.expr)  # a condition: with data while it is true
        for part in selectors_of(alert.expr):
            assert quick.query(part), f"{alert.name}: {part} has no data"


def test_four_faults_fire_and_resolve(quick: Lab, tmp_path: Path) -> None:
    def fires(alert: str) -> dict[str, str]:
        wait_until(lambda: alert in quick.firing(), f"{alert} to fire", FIRES_S)
        return quick.firing()[alert]

    def resolves(alert: str) -> None:
        wait_until(lambda: alert not in quick.firing(), f"{alert} to resolve", FIRES_S)

    wait_until(lambda: quick.query("ddp_straggler_skew_ratio > 0"), "the ranks to be compared")
    for alert in ("DdpStraggler", "DdpStalledStep", "DdpHeartbeatMissing", "DdpCheckpointStale", "DdpRanksMissing"):
        resolves(alert)

    # A rank that is slow.
    (tmp_path / "slow").touch()
    told = fires("DdpStraggler")
    assert (told["job_id"], told["node"], told["rank"]) == ("night", "1", "3")
    assert re.fullmatch(r"rank 3 on node 1 slows night down: \d+(\.\d+)?% of the fastest rank's speed", told["summary"])
    (tmp_path / "slow").unlink()
    resolves("DdpStraggler")

    # A rank that hangs.
    stopped = rank_pid(1)
    os.kill(stopped, signal.SIGSTOP)
    assert fires("DdpStalledStep")["summary"].startswith("night has taken no step for ")
    fires("DdpHeartbeatMissing")
    os.kill(stopped, signal.SIGCONT)
    resolves("DdpStalledStep")
    resolves("DdpHeartbeatMissing")

    # A folder that takes no checkpoint.
    folder = tmp_path / "runs" / "night" / "checkpoints"
    folder.rename(folder.with_name("aside"))
    folder.touch()
    assert fires("DdpCheckpointFailing")["summary"] == "night could not save a checkpoint: io"
    assert fires("DdpCheckpointStale")["summary"].startswith("the newest checkpoint of night is ")
    folder.unlink()
    folder.with_name("aside").rename(folder)
    resolves("DdpCheckpointStale")

    # A node that is lost: the other one waits for it.
    os.kill(nodes()[1]["pid"], signal.SIGKILL)
    told = fires("DdpRanksMissing")
    assert re.fullmatch(r"night runs with [012] ranks, which are fewer than it should have", told["summary"])
    assert fires("DdpScrapeDown")["summary"].startswith("node 1 of night does not answer at ")
    done = ddpctl("monitor", "status", "--url", quick.url)
    assert re.search(r"^nodes +[01] of [12] answer$", done.stdout, re.M)  # node 0 ends when it has waited long enough
    assert "  DdpScrapeDown (warning, firing): node 1 of night does not answer at " in done.stdout
