"""The target slurm on a real cluster: slurmctld and slurmds of Debian's Slurm, each node in a namespace of its own."""

import gzip
import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import exact
import pytest
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import (
    FILE,
    LONG,
    ROOT,
    SLOW,
    SSHD,
    STEPS,
    Site,
    assert_trained,
    clear,
    login_node,
    start_soon,
    until,
)
from tests.e2e.driver import SCRIPTS, check_interrupted

from ddpwire.run_files import read_outcome

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(1800),
]
WEIGHTS = re.compile(r"weights sha256 (\w+)")


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_lab.Slurm]:
    with slurm_lab.cluster(3, prefix="ddpslurm") as cluster:
        yield cluster


@pytest.fixture
def site(slurm: slurm_lab.Slurm, tmp_path: Path) -> Iterator[Site]:
    yield Site(slurm=slurm, folder=tmp_path)
    clear(slurm)


def test_train_sbatch_as_it_is_checked_out(site: Site) -> None:
    site.sh("sbatch", "--wait", "--output=job.log", str(ROOT / "slurm" / "train.sbatch"))
    assert_trained((site.folder / "job.log").read_text(), 4)
    (run,) = json.loads(site.ddpctl("ps", "--folder", "runs", "--json"))
    assert (run["kind"], run["state"], run["nodes"], run["ranks"]) == ("slurm", "succeeded", "2", 2)
    folder = f"runs/{run['run']}"
    assert json.loads(site.ddpctl("status", folder, "--json")) == run
    timeline = json.loads(site.ddpctl("timeline", folder, "--json"))
    assert (timeline["restarts"], "queue" in timeline["seconds"]) == (0, False), "when it was submitted is not known"
    assert {"training", "end"} <= timeline["seconds"].keys()
    assert WEIGHTS.search(site.ddpctl("logs", folder))


@pytest.mark.skipif(not SSHD, reason="needs sshd (apt install openssh-server)")
def test_launch_through_a_login_node_ends_with_the_weights_of_a_local_run(site: Site) -> None:
    program = ("--", "ddptrain", "--deterministic", *exact.DIGITS)
    with login_node(site):
        laptop = ("env", "-u", "SLURM_CONF", f"HOME={site.folder / 'laptop'}", sys.executable, "-m", "ddpctl")
        log = site.sh(*laptop, "launch", "-f", FILE, "--profile", "exact", "--target", "hpc", "--name", "far", *program)
    assert re.search(r"world size +4\n", log), log
    assert WEIGHTS.findall(log) == [exact.undisturbed((1, 4), exact.DIGITS)]


def test_life_of_a_run_from_the_queue_to_a_stop(site: Site) -> None:
    """A second run waits for the nodes of the first. ddpctl shows both; both are stopped."""
    site.ddpctl("launch", "-f", FILE, "--name", "night", *SLOW, "--detach", *LONG)
    site.ddpctl("launch", "-f", FILE, "--name", "next", "--nodes", "3", "--detach", *LONG)
    site.until_log("night", r"epoch  2/")

    job = site.job("night")
    assert json.loads(site.ddpctl("status", "--json", "next"))["state"] == "pending"
    assert site.ddpctl("top", "next", "--once").splitlines()[1].startswith("job ")
    assert json.loads(site.ddpctl("timeline", "next", "--json"))["seconds"].keys() == {"queue"}
    status = json.loads(site.ddpctl("status", "--json", "night"))
    assert (status["state"], [report["alive"] for report in status["node_reports"]]) == ("training", [True, True])
    table = json.loads(site.ddpctl("ps", "--json"))
    assert [(run["run"], run["state"]) for run in table] == [("next", "pending"), ("night", "training")]
    top = json.loads(site.ddpctl("top", "night", "--once", "--json"))
    assert (top["state"], top["silent"], [row["node"] for row in top["ranks"]]) == ("training", [], [0, 0, 1, 1])
    explained = json.loads(site.ddpctl("explain", "night", "--json"))
    assert (explained["fault"], len(explained["evidence"]), explained["unknown"]) == (False, 4, [])
    profile = json.loads(site.ddpctl("profile", "night", "--seconds", "1", "--json"))
    assert (sorted(profile["shares"]), profile["unknown"]) == (["0", "1", "2", "3"], [])
    events = json.loads(gzip.decompress((site.folder / profile["trace"]).read_bytes()))["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "gloo:all_reduce"} == {0, 1, 2, 3}
    phases = json.loads(site.ddpctl("timeline", "night", "--json"))["seconds"]
    assert [phase for phase in phases if phase != "queue"][:3] == ["start", "preflight", "rendezvous"]
    assert site.ddpctl("exec", "night", "--node", "1", "--", "hostname").strip() == "node-1"
    files = sorted((site.folder / "state" / ".targets").iterdir())
    assert [path.name for path in files] == ["night.node-0.json", "night.node-1.json"]
    for node, path in enumerate(files):
        (target,) = json.loads(path.read_text())
        assert target["targets"] == [status["node_reports"][node]["state"]["metrics"].split("/")[2]]
        assert target["labels"] == {"job_id": "night", "launcher": "slurm", "node": str(node), "slurm_job": job}

    follower = site.start("logs", "-f", "night")
    until(lambda: "epoch" in site.output(), 60, site.output)
    site.ddpctl("stop", "next")
    assert site.state(site.job("next")) == "CANCELLED"
    # Because a later job is pending, scancel sends the signal twice.
    later = site.sh("sbatch", "--parsable", "--hold", "--wrap=true").strip()
    site.ddpctl("stop", "night")
    site.sh("scancel", later)
    assert follower.wait(60) == 0
    stopped = json.loads(site.ddpctl("status", "--json", "night"))
    assert (stopped["state"], stopped["code"], stopped["outcome"]["cause"]) == ("stopped", 143, "stopped")
    assert site.checkpoints("night")[-1] == stopped["outcome"]["step"]
    assert list((site.folder / "state" / ".targets").iterdir()) == []
    log = site.ddpctl("logs", "night", "--node", "0")
    assert "epoch  2/" in log
    assert {line.partition(" ")[0] for line in log.splitlines()} == {"[node0"}
    assert site.state(job) == "FAILED"  # it was not requeued
    assert "ExitCode=143:0" in site.sh("scontrol", "show", "job", job)


def test_ctrl_c_is_one_keyboard_interrupt_for_each_rank_and_no_requeue(site: Site) -> None:
    """Ranks 1 and 2 do not catch it. This Slurm signals every process of a step, so that a rank might hear it twice."""
    (site.folder / "script.py").write_text((SCRIPTS / "interrupted.py").read_text())
    launched = site.start("launch", "-f", FILE, "--name", "night", "--", str(site.folder / "script.py"))
    until(lambda: site.log("night").count("] ready\n") == 4, 90, site.output)
    launched.send_signal(signal.SIGINT)
    assert launched.wait(90) == 130, site.output()
    folder = site.folder / "state" / "night"
    check_interrupted((folder / f"node-{rank // 2}/rank-{rank}.log").read_text() for rank in range(4))
    assert site.state(site.job("night")) == "FAILED"  # it was not requeued
    status = json.loads(site.ddpctl("status", "--json", "night"))
    assert (status["state"], status["code"]) == ("stopped", 130)


def test_time_limit_saves_and_requeues_and_scancel_saves_and_does_not(site: Site) -> None:
    script = site.folder / "long.sbatch"
    script.write_text(site.ddpctl("render", "-f", FILE, *LONG))
    limit = ("sbatch", "--parsable", "--time=2", "--signal=B:USR1@45")
    job = site.sh("env", "SLOW=/none", *limit, str(script)).strip()
    path, run_dir = site.folder / f"digits-{job}.log", site.folder / "runs" / f"digits-{job}"

    def log() -> str:
        return path.read_text() if path.exists() else site.sh("scontrol", "show", "job", job)

    def saved() -> int:
        return max(int(match[1]) for path in run_dir.glob("checkpoints/*.pt") if (match := STEPS.fullmatch(path.name)))

    until(lambda: "slurm: requeued" in log(), 240, log)
    step = saved()
    until(lambda: site.state(job) == "PENDING", 30, lambda: site.state(job))
    start_soon(site, job)
    until(lambda: f"continuing at step {step + 1} of" in log(), 120, log)
    until(lambda: site.steps(run_dir) > step + 2, 60, log)
    site.sh("scancel", job)
    until(lambda: site.state(job) == "CANCELLED", 60, log)
    outcome = read_outcome((run_dir / "node-0" / "outcome.json").read_text())
    assert (outcome.code, outcome.cause) == (143, "stopped")
    assert saved() == outcome.step > step
    assert log().count("slurm: requeued") == 1
