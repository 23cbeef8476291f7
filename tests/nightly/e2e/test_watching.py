"""A real training, looked at while it runs and afterwards: top, timeline, report."""

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest
from tests.e2e.driver import SCRIPTS, ddpctl, node_log, processes_of, wait_until

from ddpwire.metrics import STEP_PHASES, goodput
from ddpwire.run_files import OUTCOME, read_node, read_outcome


def test_top_metrics_timeline_and_report_agree_on_a_run(tmp_path: Path) -> None:
    launch = ("launch", "--detach", "--nodes", "2", "--gpus", "2", "--device", "cpu", "--name", "seen")
    launched = ddpctl(*launch, "--", "--epochs", "5000")
    assert (launched.returncode, launched.stdout.strip()) == (0, "seen")
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", node_log(tmp_path, "seen")), "the second epoch", timeout_s=200)
        look_at_it()
        look_at_its_metrics()
    finally:
        stopped = ddpctl("stop", "seen")
    assert stopped.returncode == 0, stopped.stderr
    assert processes_of("seen") == {}
    status = json.loads(ddpctl("status", "seen", "--json").stdout)
    assert (status["code"], status["outcome"]["cause"]) == (143, "stopped")
    assert re.search(r"^run 'seen' stopped\b.*\b143\b", stopped.stderr, re.M)
    look_back(tmp_path)


def look_at_it() -> None:
    done = ddpctl("top", "seen", "--once", "--json")
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    assert (view["run"], view["state"], view["ranks_alive"], view["world_size"]) == ("seen", "training", 4, 4)
    assert view["step"] >= 45
    assert view["loss"] > 0
    assert 0 < view["goodput"] < 1
    assert [(row["rank"], row["node"]) for row in view["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for row in view["ranks"]:
        assert row["step_s"] >= row["own_s"] > 0
        assert list(row["phases"]) == list(STEP_PHASES)
        assert 0.99 < sum(row["phases"].values()) < 1.01
    title, steps, *_ = ddpctl("top", "seen", "--once").stdout.splitlines()
    assert steps.startswith("step ")
    assert [fact for fact in ("seen", "training", "2 nodes x 2 ranks", "ddptrain", "local") if fact not in title] == []


def look_at_its_metrics() -> None:
    """Every node answers with the metrics of its own ranks."""
    reports = json.loads(ddpctl("status", "seen", "--json").stdout)["node_reports"]
    assert len({report["state"]["metrics"] for report in reports}) == 2
    for report in reports:
        with urllib.request.urlopen(report["state"]["metrics"], timeout=5) as answer:  # noqa: S310
            text = answer.read().decode()
        ranks = [rank["rank"] for rank in report["state"]["ranks"]]
        assert ranks == [report["node"] * 2, report["node"] * 2 + 1]
        for rank in ranks:
            steps = re.search(rf'^ddp_steps_total{{rank="{rank}"}} ([0-9.]+)$', text, re.M)
            assert steps
            assert float(steps[1]) > 0
        assert re.search(r"^ddp_ranks_alive 2\.0$", text, re.M)
        assert "pid=" not in text


def look_back(tmp_path: Path) -> None:
    ended = ddpctl("top", "seen")
    assert (ended.returncode, ended.stdout[:14]) == (0, "seen  stopped:"), ended.stdout
    document = json.loads(ddpctl("timeline", "seen", "--json").stdout)
    assert (document["run"], document["state"]) == ("seen", "stopped")
    spans = document["spans"]
    assert [before["end"] for before in spans[:-1]] == [after["begin"] for after in spans[1:]]
    assert document["seconds"].keys() >= {"start", "preflight", "rendezvous", "import", "training", "end"}
    assert "lost" not in document["seconds"], "a requested stop loses nothing"
    title = ddpctl("timeline", "seen").stdout.splitlines()[0]
    assert [fact for fact in ("seen", "stopped", "143") if fact not in title] == []
    path = tmp_path / "sub" / "seen.html"
    refused = ddpctl("report", "seen", "--output", str(path))
    assert (refused.returncode, refused.stdout) == (73, "")
    assert str(path) in refused.stderr
    path.parent.mkdir()
    written = ddpctl("report", "seen", "--output", str(path))
    assert (written.returncode, written.stdout) == (0, f"{path}\n"), written.stderr
    headings = " ".join(re.findall("<h2>(.*?)</h2>", path.read_text()))
    subjects = ("time", "Loss", "Throughput", "step", "accuracy", "Learning rate", "nodes", "Configuration", "Events")
    assert [subject for subject in subjects if subject not in headings] == []


def test_goodput_is_one_number_wherever_it_is_shown(tmp_path: Path) -> None:
    """Also over a restart: rank 1 is killed after its first checkpoint."""
    launch = ("launch", "--nodes", "2", "--device", "cpu", "--name", "good", "--detach", "--", "--epochs", "20")
    assert ddpctl(*launch).returncode == 0
    saved = tmp_path / "runs" / "good" / "node-0" / "events.jsonl"
    wait_until(lambda: saved.exists() and '"checkpoint_saved"' in saved.read_text(), "a checkpoint", timeout_s=200)
    node = read_node((tmp_path / "runs" / "good" / "node-1" / "node.json").read_text())
    os.kill(node.ranks[0].pid, signal.SIGKILL)
    outcomes = [tmp_path / "runs" / "good" / f"node-{node}" / OUTCOME for node in (0, 1)]
    wait_until(lambda: all(path.exists() for path in outcomes), "its end", timeout_s=300)
    assert [read_outcome(path.read_text()).code for path in outcomes] == [0, 0]
    top = json.loads(ddpctl("top", "good", "--json").stdout)["goodput"]
    printed = re.search(r"goodput +(\d+) % of", node_log(tmp_path, "good"))
    assert printed is not None
    assert ddpctl("report", "good", "--output", str(tmp_path / "good.html")).returncode == 0
    reported = re.search(r"<b>(\d+) %</b><span>goodput", (tmp_path / "good.html").read_text())
    assert reported is not None
    exported = "".join((tmp_path / "runs" / "good" / f"node-{node}" / "metrics.prom").read_text() for node in (0, 1))
    sums = {
        name: sum(float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", exported, re.M))
        for name in ("ddp_productive_seconds_total", "ddp_unproductive_seconds_total")
    }
    assert top == pytest.approx(goodput(*sums.values()), rel=1e-6)
    assert int(printed[1]) == int(reported[1]) == round(100 * top)


def test_the_report_of_a_failure_has_its_last_output_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SESSION", "very-secret-value")
    (tmp_path / "fails.py").write_text(
        "import os\nprint('with', os.environ['HF_SESSION'], 'and', os.environ['MY_PASSWORD'])\nraise SystemExit(3)\n"
    )
    (tmp_path / "ddpctl.yaml").write_text("job:\n  secrets: [HF_SESSION]\n  env: {MY_PASSWORD: hunter22}\n")
    done = ddpctl("launch", "--device", "cpu", "--name", "fails", "--", "fails.py", "--api-key", "k-1", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    written = ddpctl("report", "fails", cwd=tmp_path)
    assert (written.stdout, written.stderr) == (f"{tmp_path}/fails.html\n", "")
    page = (tmp_path / "fails.html").read_text()
    (heading,) = re.findall(r"<h2>([^<]*)</h2>\n<pre>with \[REDACTED\] and \[REDACTED\]</pre>", page)
    assert [fact for fact in ("rank 0", "node 0") if fact not in heading] == []
    assert "fails.py --api-key &#39;[REDACTED]&#39;" in page
    assert [word for word in ("very-secret-value", "hunter22", "k-1") if word in page] == []
    monkeypatch.delenv("HF_SESSION")
    written = ddpctl("report", "fails", cwd=tmp_path)
    assert "HF_SESSION" in written.stderr
    assert len(re.findall(r"<h2>[^<]*</h2>\n<p>HF_SESSION: [^<]+", (tmp_path / "fails.html").read_text())) == 1


def test_top_and_timeline_of_a_script_that_reports_nothing() -> None:
    assert ddpctl("launch", "--name", "mute", "--", str(SCRIPTS / "ends.py")).returncode == 0
    assert re.match(r"mute +succeeded\b", ddpctl("top", "mute").stdout)
    document = json.loads(ddpctl("timeline", "mute", "--json").stdout)
    assert list(document["seconds"])[:3] == ["start", "preflight", "rendezvous"]
    assert list(document["seconds"])[3:] == ["import", "running"]
