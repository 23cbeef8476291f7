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
from tests.e2e.driver import PACED, ddpctl, node_log, wait_until
from tests.unit.ddpctl.expressions import ALERTS, RECORDINGS, names, plain, selectors_of
from tests.unit.repository.test_dashboards import expressions

from ddpctl.monitoring.prometheus import DASHBOARDS
from ddpwire.metrics import CATALOGUE

pytestmark = [pytest.mark.skipif(MISSING != "", reason=MISSING), pytest.mark.timeout(1800)]
PATH = os.environ["PATH"]
UNCHANGED = Path(__file__).parent / "scripts" / "unchanged.py"
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
        args = ("launch", "-d", "--nodes", "2", "--gpus", "2", "--name", "night", "-e", slow, "--", str(PACED))
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
    reports = json.loads(ddpctl("status", "night", "--json").stdout)["node_reports"]
    return [report["state"] for report in reports]


def rank_pid(rank: int) -> int:
    (pid,) = (process["pid"] for node in nodes() for process in node["ranks"] if process["rank"] == rank)
    return int(pid)


def every_expression_has_data(quick: Lab) -> None:
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
    for alert in ALERTS.values():
        quick.query(alert.expr)  # a condition: with data while it is true
        for part in selectors_of(alert.expr):
            assert quick.query(part), f"{alert.name}: {part} has no data"


def test_every_expression_has_data_and_four_faults_fire_and_resolve(quick: Lab, tmp_path: Path) -> None:
    every_expression_has_data(quick)

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
    labels: dict[str, str] = {}

    def fires_for_rank_3() -> bool:
        """Return whether the alert names rank 3. On a busy machine, another rank may be slow for a moment."""
        labels.update(quick.firing().get("DdpStraggler", {}))
        return labels.get("rank") == "3"

    wait_until(fires_for_rank_3, "DdpStraggler to fire for rank 3", FIRES_S)
    assert (labels["job_id"], labels["node"]) == ("night", "1")
    assert re.match(r"rank 3 on node 1 .*night.* \d+(\.\d+)?%", labels["summary"]), labels["summary"]
    (tmp_path / "slow").unlink()
    resolves("DdpStraggler")

    # A rank that hangs.
    stopped = rank_pid(1)
    os.kill(stopped, signal.SIGSTOP)
    assert "night" in fires("DdpStalledStep")["summary"]
    fires("DdpHeartbeatMissing")
    os.kill(stopped, signal.SIGCONT)
    resolves("DdpStalledStep")
    resolves("DdpHeartbeatMissing")

    # A folder that takes no checkpoint.
    folder = tmp_path / "runs" / "night" / "checkpoints"
    folder.rename(folder.with_name("aside"))
    folder.touch()
    assert re.match(r"night .*: io$", fires("DdpCheckpointFailing")["summary"])
    assert "night" in fires("DdpCheckpointStale")["summary"]
    folder.unlink()
    folder.with_name("aside").rename(folder)
    resolves("DdpCheckpointStale")

    # A node that is lost: the other one waits for it.
    os.kill(nodes()[1]["pid"], signal.SIGKILL)
    labels = fires("DdpRanksMissing")
    assert re.match(r"night .*\b[234] .*ranks", labels["summary"]), labels["summary"]
    assert fires("DdpScrapeDown")["summary"].startswith("node 1 of night ")
    status = json.loads(ddpctl("monitor", "status", "--url", quick.url, "--json").stdout)
    assert not all(node["up"] for node in status["nodes"])  # node 0 ends when it has waited long enough
    (alert,) = (alert for alert in status["alerts"] if alert["summary"].startswith("node 1 of night "))
    assert (alert["alert"], alert["state"], alert["severity"], alert["run"]) == (
        "DdpScrapeDown", "firing", "warning", "night",
    )  # fmt: skip


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lab]:
    """A Prometheus of two users, each of whom has a run ``night`` of an unchanged script."""
    monkeypatch.setenv("PATH", PATH)
    limits = [word for limit in ("hold=5", "stalled_step=8", "heartbeat=8") for word in ("--limit", limit)]
    folders = {user: tmp_path / user for user in ("ann", "bob")}
    targets = tuple(folder / ".targets" for folder in folders.values())
    with prometheus(tmp_path / "monitoring", "--interval", "0.5", *limits, more_targets=targets) as lab:
        try:
            for user, folder in folders.items():
                monkeypatch.setenv("DDPCTL_STATE_DIR", str(folder))
                monkeypatch.setenv("LOGNAME", user)
                options = ("--nodes", "2", "--gpus", "1", "--name", "night", "-e", f"DONE={tmp_path}/{user}-done")
                project = ("-e", "DDP_PROJECT=vision") if user == "ann" else ()
                done = ddpctl("launch", "-d", *options, *project, "--", str(UNCHANGED))
                assert done.returncode == 0, done.stderr
            wait_until(lambda: len(lab.query("run:ddp_training:max == 1")) == 2, "two runs that train", 120)
            yield lab
        finally:
            for folder in folders.values():
                monkeypatch.setenv("DDPCTL_STATE_DIR", str(folder))
                ddpctl("stop", "night", "--kill")


def test_two_users_runs_of_one_name_are_two(shared: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_user(expr: str) -> dict[str, float]:
        return {series["metric"]["user"]: float(series["value"][1]) for series in shared.query(expr)}

    def looked(times: int) -> None:
        """The rules are worked out so many times more."""
        count = "sum(count_over_time(run:ddp_training:max[1h]))"
        before = float(shared.query(count)[0]["value"][1])
        wait_until(lambda: float(shared.query(count)[0]["value"][1]) > before + 2 * times, "the rules")

    records = {user: json.loads((tmp_path / user / "night" / "run.json").read_text()) for user in ("ann", "bob")}
    assert records["ann"]["uid"] != records["bob"]["uid"]
    labels_of = {series["metric"]["user"]: series["metric"] for series in shared.query("run:ddp_ranks_alive:sum")}
    assert {user: labels["run_uid"] for user, labels in labels_of.items()} == {
        user: record["uid"] for user, record in records.items()
    }
    assert (labels_of["ann"]["project"], labels_of["bob"].get("project")) == ("vision", None)
    wait_until(lambda: by_user("run:ddp_ranks_alive:sum") == {"ann": 2, "bob": 2}, "all ranks of both")
    for user, record in records.items():
        (panel,) = (expr for expr in expressions("run") if expr.startswith("run:ddp_ranks_alive:sum"))
        assert by_user(plain(panel, record["uid"])) == {user: 2}
        (panel,) = (expr for expr in expressions("run") if expr.startswith("sum by (cause) ((ddp_rank_exits_total"))
        assert len(shared.query(plain(panel, record["uid"]))) > 0
        assert shared.query(plain(panel, "0")) == []

    # A rank that ends with 0 is not missing, and no other alert judges a script that tells nothing.
    (tmp_path / "ann-done").touch()
    wait_until(lambda: by_user("run:ddp_ranks_alive:sum") == {"ann": 1, "bob": 2}, "the end of a rank of ann's")
    looked(30)  # for longer than a condition must hold
    assert shared.query('count_over_time(ALERTS{alertname=~"Ddp.*", alertstate="firing"}[1h])') == []

    # A node that is lost is missed in its own run.
    monkeypatch.setenv("DDPCTL_STATE_DIR", str(tmp_path / "bob"))
    os.kill(nodes()[1]["pid"], signal.SIGKILL)
    wait_until(lambda: "DdpRanksMissing" in shared.firing(), "DdpRanksMissing to fire", FIRES_S)
    fired = shared.firing()["DdpRanksMissing"]
    assert (fired["job_id"], fired["user"], fired["run_uid"]) == ("night", "bob", records["bob"]["uid"])
    assert not shared.query('ALERTS{alertname="DdpRanksMissing", user="ann"}')

    # What the rules record is within the budget that docs/monitoring.md states.
    for user in records:
        recorded = shared.query(f'count({{__name__=~"(run|instance):ddp_.*", user="{user}"}})')
        assert int(recorded[0]["value"][1]) <= 18 + 2
