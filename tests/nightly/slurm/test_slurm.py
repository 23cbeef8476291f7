"""The target slurm on a real cluster: slurmctld and slurmds of Debian's Slurm, each node in a namespace of its own."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import exact
import pytest
from tests.cluster import slurm_lab
from tests.cluster.slurm_site import FILE, LONG, ROOT, SLOW, Site, assert_trained, clear, start_soon, until
from tests.e2e.driver import SCRIPTS
from tests.nightly.rehearse.test_rehearse import script_of

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


def test_options_of_sbatch_override_those_of_the_script(site: Site) -> None:
    script = str(ROOT / "slurm" / "train.sbatch")
    site.sh("sbatch", "--wait", "--output=job.log", "--nodes=3", "--gpus-per-node=1", script)
    assert_trained((site.folder / "job.log").read_text(), 3)
    (run,) = json.loads(site.ddpctl("ps", "--folder", "runs", "--json"))
    assert (run["kind"], run["state"], run["nodes"], run["ranks"]) == ("slurm", "succeeded", "3", 1)


def test_bench_as_a_job(site: Site) -> None:
    output = site.ddpctl("bench", "-f", FILE, "--nodes", "3", "--gpus", "1", "--sizes", "64K")
    assert re.search(r"^all_reduce +64 KiB .*", output, re.M), output
    (kept,) = (site.folder / "state" / ".checks").iterdir()
    result = json.loads(kept.read_text())
    assert (result["nodes"], result["code"]) == (["node-0", "node-1", "node-2"], 0)
    assert len(result["links"]) == 3
    assert json.loads(site.ddpctl("ps", "--json")) == []


def test_a_rehearsal_as_a_job(site: Site) -> None:
    (site.folder / "train.py").write_text(script_of("sound_plain"))
    flags = ("--target", "slurm", "--nodes", "1", "--only", "term", "--json")
    answer = json.loads(site.run("rehearse", *flags, "--", "train.py").stdout)
    verdicts = {row["id"]: row["verdict"] for row in answer["rows"]}
    assert (answer["code"], verdicts["save-term"], verdicts["resume"]) == (0, "ok", "ok")
    assert json.loads(site.ddpctl("ps", "--json")) == []


def test_a_training_that_was_stopped_elsewhere_goes_on_to_the_same_weights(site: Site, tmp_path: Path) -> None:
    checkpoints = exact.stopped_in_the_middle(tmp_path, ranks=4)
    program = ("ddptrain", "--deterministic", *exact.DIGITS, "--checkpoint-dir", str(checkpoints))
    resumed = site.ddpctl("launch", "-f", FILE, "--name", "night", "--", *program)
    assert "continuing at step " in resumed
    assert WEIGHTS.findall(resumed) == [exact.undisturbed((1, 4), exact.DIGITS)]


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
    output = "".join(site.ddpctl(*shlex.split(line)) for line in lines)
    block = page.partition("```console\n")[2].partition("```")[0].replace("(partition gpu)", "(partition debug)")
    wanted = [line for line in block.splitlines() if line[:1] != "$" and line != "..." and "preflight" not in line]
    printed = {without_numbers(line) for line in output.replace(str(site.folder / "state"), RUNS).splitlines()}
    assert {without_numbers(line) for line in wanted} - printed == set()


def without_numbers(line: str) -> str:
    """The line with N for numbers, times and lists of nodes."""
    return re.sub(r"\[?[0-9][0-9.:T,-]*\]?", "N", line)


RUNS = "/home/me/.local/state/ddpctl/runs"  # of the guide
INTERRUPTED = SCRIPTS / "interrupted.py"


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
    assert "] saved" not in site.log("night")
    assert site.state(site.job("night")) in ("CANCELLED", "FAILED")


def test_an_array_runs_four(site: Site) -> None:
    script = site.folder / "task.py"
    script.write_text("import os\nprint('task', os.environ['SLURM_ARRAY_TASK_ID'], 'rank', os.environ['RANK'])\n")
    output = site.ddpctl("launch", "-f", FILE, "--name", "four", "--nodes", "1", "--gpus", "1", "--array", "0-3%2",
                       "--", "task.py")  # fmt: skip
    for task in range(4):
        assert f"[task {task}] task {task} rank 0\n" in output
    folder = site.folder / "state" / "four"
    array = json.loads(site.ddpctl("status", "four", "--json"))
    assert array["state"] == "succeeded"
    assert [(row["run"], row["state"], row["env"], row["checkpoint_dir"]) for row in array["tasks"]] == [
        (f"four.task-{task}", "succeeded", {"SLURM_ARRAY_TASK_ID": str(task)}, f"{folder}/task-{task}/checkpoints")
        for task in range(4)
    ]
    assert json.loads(site.ddpctl("status", "four", "--task", "2", "--json"))["run"] == "four.task-2"
    output = site.ddpctl("logs", "four", "--task", "2")
    assert ("task 2 rank 0" in output, "task 1" in output) == (True, False)
    seen = json.loads(site.ddpctl("top", "four", "--task", "2", "--once", "--json"))
    assert (seen["run"], seen["state"]) == ("four.task-2", "succeeded")
    assert "running" in json.loads(site.ddpctl("timeline", "four", "--task", "2", "--json"))["seconds"]
    assert site.ddpctl("report", "four", "--task", "2").endswith("/four.task-2.html\n")


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
    assert any(line.startswith(f"slurm: node-1: {mine} ") and "RUN_DIR" in line for line in lines)
    assert json.loads((mine / "node-0" / "outcome.json").read_text())["code"] == 66


def test_the_doctor_is_a_short_job(site: Site) -> None:
    output = site.sh(sys.executable, "-m", "ddpctl", "doctor", "-f", FILE, "--json")
    result = json.loads(output[output.index("{\n") : output.rindex("}") + 1])  # and what it says on stderr
    hosts = {row["host"] for row in result["nodes"]}  # Slurm chooses two of its three
    assert (result["code"], len(hosts), hosts <= {"node-0", "node-1", "node-2"}) == (0, 2, True)
    status = {(row["node"], row["check"]): row["status"] for row in result["results"]}
    assert "bad" not in status.values()
    assert [status[node, check] for node in (0, 1) for check in ("ports", "path MTU", "libraries")] == ["ok"] * 6
    assert not list((site.folder / "state").glob("doctor-*"))


def test_ranks_of_a_job_for_cpus_see_no_gpu(site: Site) -> None:
    """Slurm unsets CUDA_VISIBLE_DEVICES in the steps of a job without GPUs: all GPUs of the node would be visible."""
    names = ("CUDA_VISIBLE_DEVICES", "DDP_DEVICE", "LOCAL_WORLD_SIZE")
    (site.folder / "show.py").write_text(
        f"import json, os\nprint('seen', json.dumps({{name: os.environ.get(name) for name in {names}}}))\n"
    )
    step = f"import os; print('step', {names[0]!r} in os.environ)"
    assert site.sh("env", f"{names[0]}=0", "srun", "--nodes=1", sys.executable, "-c", step) == "step False\n"
    site.sh("env", f"{names[0]}=0", sys.executable, "-m", "ddpctl", "launch", "-f", FILE, "--device", "cpu",
            "--name", "cpu", "--", "show.py")  # fmt: skip
    seen = re.findall(r"seen ({.*})", site.ddpctl("logs", "cpu"))
    assert [json.loads(text) for text in seen] == [dict(zip(names, ("", "cpu", "2"), strict=True))] * 4


COMMANDS = """\
job:
  nodes: 2
  gpus: 1
  max_restarts: 0
  node_setup: ['echo "$NODE_RANK setup" >>$NAME; exit $SETUP']
  node_teardown: ['echo "$NODE_RANK teardown $DDP_EXIT_CODE" >>$NAME; exit 9']
  command: [act.py]
target: slurm
"""
ACT = """\
import os, sys
print(os.environ["NODE_RANK"], "rank", file=open(os.environ["NAME"], "a"))
sys.exit(int(os.environ["CODE"]))
"""


def test_node_commands_run_before_and_after_the_ranks_of_each_node(site: Site) -> None:
    (site.folder / "ddpctl.yaml").write_text(COMMANDS)
    (site.folder / "act.py").write_text(ACT)
    for name, setup, code, ended in (("good", 0, 0, 0), ("bad", 0, 3, 3), ("unset", 23, 0, 23)):
        values = {"NAME": name, "SETUP": setup, "CODE": code}
        done = site.run("launch", "--name", name, *(f"--env={key}={value}" for key, value in values.items()))
        assert done.returncode == ended, done.stdout + done.stderr
        lines = (site.folder / name).read_text().splitlines()
        assert sorted(lines[-2:]) == [f"0 teardown {ended}", f"1 teardown {ended}"]
        assert sorted(lines[:2]) == ["0 setup", "1 setup"]
        assert sorted(lines[2:-2]) == ([] if setup else ["0 rank", "1 rank"])
        outcome = read_outcome((site.folder / "state" / name / "node-1" / "outcome.json").read_text())
        assert (outcome.code, outcome.cause) == (ended, {0: "ok", 3: "error", 23: "setup"}[ended])


def test_job_of_a_lost_node_is_requeued_and_resumes(site: Site) -> None:
    def phases() -> list[str]:
        return [span["phase"] for span in json.loads(site.ddpctl("timeline", "lost", "--json"))["spans"]]

    site.ddpctl("launch", "-f", FILE, "--name", "lost", "--detach", *SLOW, *LONG, "--checkpoint-every", "10")
    job = site.job("lost")
    site.until_log("lost", r"epoch  2/")
    os.kill(int((site.slurm.folder / "slurmd-node-1.pid").read_text()), signal.SIGKILL)
    until(lambda: site.state(job) == "PENDING", 60, lambda: site.state(job))
    reached = site.checkpoints("lost")[-1]
    waiting = json.loads(site.ddpctl("status", "lost", "--json"))
    assert (waiting["state"], "requeue 1 of 20" in waiting["message"]) == ("pending", True)
    assert phases()[-1] == "queue"
    start_soon(site, job)
    site.until_log("lost", r"continuing at step")
    assert int(re.findall(r"continuing at step (\d+) of", site.log("lost"))[-1]) > reached
    site.ddpctl("stop", "lost")
    assert json.loads(site.ddpctl("timeline", "lost", "--json"))["restarts"] == 1
    seen = phases()
    queued = max(index for index, phase in enumerate(seen) if phase == "queue")
    assert "training" in seen[:queued]
    assert seen[queued + 1 :][:2] == ["start", "preflight"]


def test_more_gpus_than_a_node_has_are_refused(site: Site) -> None:
    refused = site.run("launch", "-f", FILE, "--gpus", "9")
    assert refused.returncode == 78
    assert "2 nodes of 9 GPUs" in refused.stderr
    assert "3 nodes with 8 CPUs, 8000 MB, gpu:2" in refused.stderr
    assert json.loads(site.ddpctl("ps", "--json")) == []
