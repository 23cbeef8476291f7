"""The target slurm on a real cluster: slurmctld and slurmds of Debian's Slurm, each node in a namespace of its own."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import exact
import pytest
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import ROOT, SSHD, STEPS, Site, login_node, until
from tests.unit.ddpctl.test_profile import check_chrome_trace
from tests.e2e.driver import PACED

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(1800),
]
FILE = str(ROOT / "examples" / "slurm.yaml")
EXACT = ("-f", FILE, "--profile", "exact")
LONG = ("--", str(PACED), "--epochs", "2000")
SHORT = ("--", "ddptrain", "--epochs", "2", "--deterministic")
WEIGHTS = re.compile(r"weights sha256 (\w+)")
ACCURACY = re.compile(r"test accuracy +([0-9.]+) %")


@pytest.fixture(scope="module")
def slurm() -> Iterator[slurm_lab.Slurm]:
    with slurm_lab.cluster(3, prefix="ddpslurm") as cluster:
        yield cluster


@pytest.fixture
def site(slurm: slurm_lab.Slurm, tmp_path: Path) -> Iterator[Site]:
    site = Site(slurm=slurm, folder=tmp_path)
    yield site
    slurm.run("scancel", "--user=root")
    until(lambda: not slurm.run("squeue", "--noheader").stdout.strip(), 40, lambda: "jobs are left")


def trained(text: str, ranks: int) -> None:
    assert re.search(rf"world size +{ranks}\n", text), text
    assert (match := ACCURACY.search(text)), text
    assert float(match[1]) >= 98


def test_train_sbatch_as_it_is_checked_out(site: Site) -> None:
    script = str(ROOT / "slurm" / "train.sbatch")
    site.sh("sbatch", "--wait", "--output=two.log", script)
    trained((site.folder / "two.log").read_text(), 4)
    site.sh("sbatch", "--wait", "--output=three.log", "--nodes=3", "--gpus-per-node=1", script)
    trained((site.folder / "three.log").read_text(), 3)
    by_hand = json.loads(site.ddpctl("ps", "--folder", "runs", "--json"))
    assert [(run["kind"], run["state"], run["nodes"], run["ranks"]) for run in by_hand] == [
        ("slurm", "succeeded", "3", 1),
        ("slurm", "succeeded", "2", 2),
    ]
    folder = f"runs/{by_hand[0]['run']}"
    assert json.loads(site.ddpctl("status", folder, "--json")) == by_hand[0]
    spent = json.loads(site.ddpctl("timeline", folder, "--json"))
    assert (spent["restarts"], "queue" in spent["seconds"]) == (0, False), "when it was submitted is not known"
    assert {"training", "end"} <= spent["seconds"].keys()
    assert "weights sha256 " in site.ddpctl("logs", folder)


def test_the_weights_are_those_of_a_local_run_also_through_a_login_node(site: Site) -> None:
    digits = str(ROOT / "examples" / "digits.yaml")
    here = site.ddpctl("launch", *EXACT, "--name", "here", *SHORT)
    local = site.ddpctl("launch", "-f", digits, "--profile", "exact", "--device", "cpu", *SHORT)
    assert WEIGHTS.findall(here) == WEIGHTS.findall(local) != []
    assert re.search(r"world size +4\n", here), here
    if SSHD:
        with login_node(site):
            far = site.sh("env", "-u", "SLURM_CONF", f"HOME={site.folder / 'laptop'}", sys.executable, "-m", "ddpctl",
                          "launch", *EXACT, "--target", "hpc", "--name", "far", *SHORT)  # fmt: skip
        assert WEIGHTS.findall(far) == WEIGHTS.findall(local)


def test_bench_as_a_job(site: Site) -> None:
    said = site.ddpctl("bench", "-f", FILE, "--nodes", "3", "--gpus", "1", "--sizes", "64K")
    assert re.search(r"^all_reduce +64 KiB .*", said, re.M), said
    (kept,) = (site.folder / "state" / ".checks").iterdir()
    found = json.loads(kept.read_text())
    assert (found["nodes"], found["code"]) == (["node-0", "node-1", "node-2"], 0)
    assert len(found["links"]) == 3
    assert json.loads(site.ddpctl("ps", "--json")) == []


def test_a_training_that_was_stopped_elsewhere_goes_on_to_the_same_weights(site: Site, tmp_path: Path) -> None:
    checkpoints = exact.stopped_in_the_middle(tmp_path, ranks=4)
    program = ("ddptrain", "--deterministic", *exact.DIGITS, "--checkpoint-dir", str(checkpoints))
    there = site.ddpctl("launch", "-f", FILE, "--name", "night", "--", *program)
    assert "continuing at step " in there
    assert WEIGHTS.findall(there) == [exact.undisturbed((1, 4), exact.DIGITS)]


def test_a_runs_life_from_the_queue_to_a_stop(site: Site) -> None:
    site.ddpctl("launch", "-f", FILE, "--name", "night", "--detach", *LONG)
    site.ddpctl("launch", "-f", FILE, "--name", "next", "--nodes", "3", "--detach", *LONG)
    until(lambda: "epoch  2/" in site.log("night"), 90, lambda: site.log("night"))
    (waiting,) = (json.loads(site.ddpctl("status", "--json", "next"))[key] for key in ("state",))
    assert waiting == "pending"
    assert site.ddpctl("status", "next").startswith("next  pending: job ")
    until(lambda: ": 2 of 2" in site.ddpctl("status", "night").partition("training")[2], 30, lambda: site.log("night"))
    status = json.loads(site.ddpctl("status", "--json", "night"))
    assert (status["state"], [report["alive"] for report in status["node_reports"]]) == ("training", [True, True])
    seen = json.loads(site.ddpctl("top", "night", "--once", "--json"))
    assert (seen["state"], seen["silent"], [row["node"] for row in seen["ranks"]]) == ("training", [], [0, 0, 1, 1])
    found = json.loads(site.ddpctl("explain", "night", "--json"))
    assert (found["fault"], len(found["evidence"]), found["unknown"]) == (False, 4, [])
    seen = json.loads(site.ddpctl("profile", "night", "--seconds", "1", "--json"))
    assert (sorted(seen["shares"]), seen["unknown"]) == (["0", "1", "2", "3"], [])
    events = check_chrome_trace((site.folder / seen["trace"]).read_bytes())
    assert {event["pid"] for event in events if event["name"] == "gloo:all_reduce"} == {0, 1, 2, 3}
    assert site.ddpctl("top", "next", "--once").splitlines()[1].startswith("job ")
    spent = json.loads(site.ddpctl("timeline", "night", "--json"))["seconds"]
    assert [word for word in spent if word != "queue"][:3] == [
        "start",
        "preflight",
        "rendezvous",
    ]  # a short queue is none
    assert json.loads(site.ddpctl("timeline", "next", "--json"))["seconds"].keys() == {"queue"}
    assert site.ddpctl("ps").splitlines()[1].split()[:2] == ["next", "pending"]
    assert site.ddpctl("exec", "night", "--node", "1", "--", "hostname").strip() == "node-1"
    job = site.job("night")
    files = sorted((site.folder / "state" / ".targets").iterdir())
    assert [path.name for path in files] == ["night.node-0.json", "night.node-1.json"]
    assert [json.loads(path.read_text()) for path in files] == [
        [
            {
                "targets": [report["state"]["metrics"].split("/")[2]],
                "labels": {"job_id": "night", "launcher": "slurm", "node": str(node), "slurm_job": job},
            }
        ]
        for node, report in enumerate(status["node_reports"])
    ]
    followed = site.start("logs", "-f", "night")
    assert "run 'next' stopped" in site.ddpctl("stop", "next")
    # Slurm and ddprun both signal the ranks: which of the two a rank heard first is not said. Because a later job is
    # pending, scancel sends the signal twice.
    later = site.sh("sbatch", "--parsable", "--hold", "--wrap=true").strip()
    assert "run 'night' stopped, exit code 143: " in site.ddpctl("stop", "night")
    site.sh("scancel", later)
    assert followed.wait(30) == 0
    assert "slurm: stopped on request: asking the ranks to save and end\n" in (site.folder / "logs.txt").read_text()
    assert list((site.folder / "state" / ".targets").iterdir()) == []
    last = json.loads(site.ddpctl("status", "--json", "night"))["outcome"]["step"]
    assert site.checkpoints("night")[-1] == last
    of_node_0 = site.ddpctl("logs", "night", "--node", "0")
    assert "epoch  2/" in of_node_0
    assert {line.partition(" ")[0] for line in of_node_0.splitlines()} == {"[node0"}
    assert site.state(site.job("night")) == "FAILED"  # its exit code is 143; it was not requeued


def test_the_guide_from_nothing_to_a_run(site: Site) -> None:
    """The file of docs/slurm.md, its launches, and the output that the page shows but for numbers and versions."""
    page = (ROOT / "docs/slurm.md").read_text()
    text = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)[0]
    here = {"partition: gpu": "partition: debug", "cpus: 8": "cpus: 2, device: cpu"}
    for shown, real in (here | {"/home/me/miniforge3/envs/ddp/bin/python": sys.executable}).items():
        assert text.count(shown) == 1
        text = text.replace(shown, real)
    (site.folder / "ddpctl.yaml").write_text(text)
    shutil.copy(ROOT / "examples/plain_ddp.py", site.folder / "train.py")
    lines = [line.partition(" #")[0] for line in re.findall(r"^(?:\$ )?ddpctl (.*)$", page, re.M)]
    assert [line.split()[0] for line in lines] == ["launch", "launch", "attach"]
    said = "".join(site.ddpctl(*shlex.split(line)) for line in lines)
    block = page.partition("```console\n")[2].partition("```")[0].replace("(partition gpu)", "(partition debug)")
    wanted = [line for line in block.splitlines() if line[:1] != "$" and line != "..." and "preflight" not in line]
    printed = {without_numbers(line) for line in said.replace(str(site.folder / "state"), RUNS).splitlines()}
    assert {without_numbers(line) for line in wanted} - printed == set()


def without_numbers(line: str) -> str:
    """The line with N for numbers, times and lists of nodes."""
    return re.sub(r"\[?[0-9][0-9.:T,-]*\]?", "N", line)


RUNS = "/home/me/.local/state/ddpctl/runs"  # of the guide
INTERRUPTED = Path(__file__).parents[1] / "e2e/scripts/interrupted.py"


def test_ctrl_c_is_one_keyboard_interrupt_for_each_rank_and_no_requeue(site: Site) -> None:
    """Ranks 1 and 2 do not catch it. This Slurm signals every process of a step, so that a rank might hear it twice."""
    (site.folder / "script.py").write_text(INTERRUPTED.read_text())
    launched = site.start("launch", "-f", FILE, "--name", "night", "--", str(site.folder / "script.py"))
    until(lambda: site.log("night").count("] ready\n") == 4, 90, lambda: site.log("night"))
    launched.send_signal(signal.SIGINT)
    assert launched.wait(60) == 130
    said = (site.folder / "logs.txt").read_text()
    assert "stopping run 'night': ranks that are running have 30 s to save; Ctrl-C again kills them\n" in said
    assert "slurm: interrupted: the ranks get SIGINT\n" in said
    assert "run 'night' stopped, exit code 130" in said
    for rank in range(4):
        log = (site.folder / "state" / "night" / f"node-{rank // 2}" / f"rank-{rank}.log").read_text()
        if rank in (0, 3):
            assert log == "ready\ninterrupted\nsaved\n"
        else:
            assert log.startswith("ready\nTraceback ")
            assert log.endswith("\nKeyboardInterrupt\n")
    assert "requeued" not in said
    assert site.state(site.job("night")) == "FAILED"


def test_a_second_ctrl_c_kills(site: Site) -> None:
    (site.folder / "script.py").write_text(
        INTERRUPTED.read_text().replace("sleep(2)", "sleep(300)").replace('"12"', '""')
    )
    launched = site.start("launch", "-f", FILE, "--name", "night", "--", str(site.folder / "script.py"))
    until(lambda: site.log("night").count("] ready\n") == 4, 90, lambda: site.log("night"))
    launched.send_signal(signal.SIGINT)
    until(lambda: site.log("night").count("] interrupted\n") == 4, 60, lambda: site.log("night"))
    launched.send_signal(signal.SIGINT)
    assert launched.wait(90) == 130
    assert "killing run 'night'\n" in (site.folder / "logs.txt").read_text()
    assert site.state(site.job("night")) in ("CANCELLED", "FAILED")


def start_soon(site: Site, job: str) -> None:
    """A requeued job starts again in five seconds, and not in two minutes.

    Slurm takes that once its nodes have let the job go. A node refuses a job's credential of the second in which the
    job ended there ("Job credential revoked").
    """
    update = ("scontrol", "update", f"JobId={job}", "StartTime=now+5")
    until(lambda: site.slurm.run(*update).returncode == 0, 60, lambda: site.sh("scontrol", "show", "job", job))


def test_a_time_limit_saves_requeues_and_resumes_and_scancel_saves_and_does_not(site: Site) -> None:
    script = site.folder / "long.sbatch"
    script.write_text(site.ddpctl("render", "-f", FILE, *LONG))
    job = site.sh("sbatch", "--parsable", "--time=2", "--signal=B:USR1@45", str(script)).strip()
    log, run_dir = site.folder / f"digits-{job}.log", site.folder / "runs" / f"digits-{job}"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    def saved() -> int:
        return max(int(match[1]) for path in run_dir.glob("checkpoints/*.pt") if (match := STEPS.fullmatch(path.name)))

    until(lambda: "slurm: requeued" in said(), 240, said)
    assert "slurm: Slurm will end this job soon: asking the ranks to save and end\n" in said()
    first = saved()
    until(lambda: site.state(job) == "PENDING", 30, lambda: site.state(job))

    start_soon(site, job)
    until(
        lambda: f"continuing at step {first + 1} of" in said(),
        120,
        lambda: said()[-2000:] + site.sh("scontrol", "show", "job", job),
    )
    time.sleep(2)
    site.sh("scancel", job)
    until(lambda: site.state(job) == "CANCELLED", 30, lambda: site.state(job))
    outcome = json.loads((run_dir / "node-0" / "outcome.json").read_text())
    assert (outcome["code"], outcome["cause"]) == (143, "stopped")
    assert saved() == outcome["step"] > first
    assert said().count("slurm: requeued") == 1


def test_an_array_runs_four(site: Site) -> None:
    script = site.folder / "task.py"
    script.write_text("import os\nprint('task', os.environ['SLURM_ARRAY_TASK_ID'], 'rank', os.environ['RANK'])\n")
    said = site.ddpctl("launch", "-f", FILE, "--name", "four", "--nodes", "1", "--gpus", "1", "--array", "0-3%2",
                       "--", "task.py")  # fmt: skip
    assert "run 'four' succeeded" in said
    for task in range(4):
        assert f"[task {task}] task {task} rank 0\n" in said
    folder = site.folder / "state" / "four"
    tasks = json.loads(site.ddpctl("status", "four", "--json"))["tasks"]
    assert [(one["run"], one["state"], one["env"], one["checkpoint_dir"]) for one in tasks] == [
        (f"four.task-{task}", "succeeded", {"SLURM_ARRAY_TASK_ID": str(task)}, f"{folder}/task-{task}/checkpoints")
        for task in range(4)
    ]
    assert json.loads(site.ddpctl("status", "four", "--task", "2", "--json"))["run"] == "four.task-2"
    said = site.ddpctl("logs", "four", "--task", "2")
    assert ("task 2 rank 0" in said, "task 1" in said) == (True, False)
    seen = json.loads(site.ddpctl("top", "four", "--task", "2", "--once", "--json"))
    assert (seen["run"], seen["state"]) == ("four.task-2", "succeeded")
    assert "running" in json.loads(site.ddpctl("timeline", "four", "--task", "2", "--json"))["seconds"]
    assert site.ddpctl("report", "four", "--task", "2").endswith("/four.task-2.html\n")


def test_more_gpus_than_there_are(site: Site) -> None:
    said = site.ddpctl("launch", "-f", FILE, "--gpus", "9", check=False)
    assert said == (
        "ddpctl: Slurm rejects the job (2 nodes of 9 GPUs): Requested node configuration is not available; "
        "the partitions have: debug*: 3 nodes with 8 CPUs, 8000 MB, gpu:2\n"
    )


def test_a_folder_that_the_nodes_do_not_share_is_named(site: Site) -> None:
    mine = site.folder / "mine"
    mine.mkdir()
    slurmd = (site.slurm.folder / "slurmd-node-1.pid").read_text().strip()
    subprocess.run(
        ["/usr/bin/nsenter", "-t", slurmd, "-m", "/usr/bin/mount", "-t", "tmpfs", "none", str(mine)],
        check=True,
        timeout=10,
    )
    try:
        site.sh("env", f"RUN_DIR={mine}", "sbatch", "--wait", "--output=job.log", str(ROOT / "slurm" / "train.sbatch"),
                check=False)  # fmt: skip
    finally:
        subprocess.run(["/usr/bin/nsenter", "-t", slurmd, "-m", "/usr/bin/umount", str(mine)], check=True, timeout=10)
    lines = (site.folder / "job.log").read_text().splitlines()
    refused = f"node-1: {mine} is not the same folder as on the head node: set RUN_DIR to a folder that all nodes share"
    assert refused in lines
    assert lines[-1] == "slurm: not every node can run this job: see the lines above"
    assert json.loads((mine / "node-0" / "outcome.json").read_text())["code"] == 66


def phases(site: Site, run: str) -> list[str]:
    return [span["phase"] for span in json.loads(site.ddpctl("timeline", run, "--json"))["spans"]]


def test_a_lost_slurmd_is_a_requeue(site: Site) -> None:
    site.ddpctl("launch", "-f", FILE, "--name", "lost", "--detach", *LONG, "--checkpoint-every", "10")
    job = site.job("lost")
    until(lambda: "epoch  2/" in site.log("lost"), 90, lambda: site.log("lost"))
    dead = site.slurm.folder / "slurmd-node-1.pid"
    os.kill(int(dead.read_text()), signal.SIGKILL)
    until(lambda: site.state(job) == "PENDING", 60, lambda: site.state(job))
    reached = site.checkpoints("lost")[-1]
    waiting = json.loads(site.ddpctl("status", "lost", "--json"))
    assert waiting["state"] == "pending"
    assert re.match(rf"requeued(?: at step \d+)? \(requeue 1 of 20\); job {job} is waiting \(", waiting["message"])
    assert phases(site, "lost")[-1] == "queue"
    start_soon(site, job)
    until(lambda: "continuing at step" in site.log("lost"), 90, lambda: site.log("lost"))
    again = int(re.findall(r"continuing at step (\d+) of", site.log("lost"))[-1])
    assert again > reached
    assert "run 'lost' stopped" in site.ddpctl("stop", "lost")
    spent = json.loads(site.ddpctl("timeline", "lost", "--json"))
    assert spent["restarts"] == 1
    seen = [span["phase"] for span in spent["spans"]]
    waited = max(index for index, phase in enumerate(seen) if phase == "queue")
    assert "training" in seen[:waited]
    assert seen[waited + 1 :][:2] == ["start", "preflight"]


def test_the_doctor_is_a_short_job(site: Site) -> None:
    said = site.sh(sys.executable, "-m", "ddpctl", "doctor", "-f", FILE, "--json")
    result = json.loads(said[said.index("{\n") : said.rindex("}") + 1])  # and what it says on stderr
    hosts = {one["host"] for one in result["nodes"]}  # Slurm chooses two of its three
    assert (result["code"], len(hosts), hosts <= {"node-0", "node-1", "node-2"}) == (0, 2, True)
    found = {(one["node"], one["check"]): one["status"] for one in result["results"]}
    assert "bad" not in found.values()
    assert [found[node, check] for node in (0, 1) for check in ("ports", "path MTU", "libraries")] == ["ok"] * 6
    assert not list((site.folder / "state").glob("doctor-*"))
