"""The target ssh with real sshds: a laptop and four machines out of network namespaces, runtime none. Needs root.

All tests share one lab. Each box has two GPUs, for which device nodes stand.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator

import exact
import pytest
from tests.cluster.ssh_cluster import CLI, Lab, cluster
from tests.cluster.ssh_lab import ROOT_MISSING
from tests.e2e.driver import PACED, wait_until

from ddpwire.run_files import CHECKPOINTS, COPY

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
TRAINING = ("--", "--deterministic", *exact.DIGITS)
FOREVER = ("-e", "SLOW=/none", "--", str(PACED), "--epochs", "5000")
HOLD = """\
import os, pathlib, time
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
end = pathlib.Path.home() / "end" / os.environ["DDP_RUN_ID"]
while not end.exists():
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("ssh"), boxes_wanted=4, gpus=2) as made:
        yield made


@pytest.fixture
def lab(built: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The lab, without runs of an earlier test; a test that leaves a process behind fails."""
    monkeypatch.setenv("PATH", built.variables["PATH"])
    for folder in (built.folder / "runs", *(each.home / ".ddpctl" for each in built.boxes)):
        shutil.rmtree(folder, ignore_errors=True)
    (built.person.home / ".ssh/config").unlink(missing_ok=True)
    built.write(hosts=addresses(built, 0, 1))
    yield built
    runs = [path.name for path in (built.folder / "runs").glob("*")]
    remaining = {pid: line for run in runs for pid, line in built.alive(run).items()}
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert remaining == {}


def addresses(lab: Lab, *numbers: int) -> str:
    return f"[{', '.join(lab.boxes[number].address for number in numbers)}]"


def weights(text: str) -> str:
    match = re.search(r"weights sha256 (\w+)", text)
    assert match, text
    return match[1]


def test_life_of_a_run_that_trains_as_one_machine_does(lab: Lab) -> None:
    """Launched, shown, reported, resumed, pulled, removed; the weights are those of one machine, bit for bit."""
    launched = lab.ddpctl("launch", "--name", "night", *TRAINING)
    assert launched.returncode == 0, launched.stderr + launched.stdout
    assert weights(launched.stdout) == exact.undisturbed((1, 4), exact.DIGITS)
    assert lab.ddpctl("logs", "night").stdout == lab.log("night", 0) + lab.log("night", 1)
    status = json.loads(lab.ddpctl("status", "night", "--json").stdout)
    checkpoints = f"{lab.boxes[0].address}:~/.ddpctl/runs/night/checkpoints"
    assert (status["state"], status["code"], status["checkpoint_dir"]) == ("succeeded", 0, checkpoints)
    phases = json.loads(lab.ddpctl("timeline", "night", "--json").stdout)["seconds"]
    assert list(phases)[:4] == ["start", "preflight", "rendezvous", "import"]
    assert phases["training"] > 0
    report = lab.ddpctl("report", "night", "--output", str(lab.folder / "night.html"))
    assert (report.returncode, report.stderr) == (0, "")
    assert "<h2>Throughput, samples per second</h2>" in (lab.folder / "night.html").read_text()

    resumed = lab.ddpctl("launch", "--resume", "night", "--name", "more", *TRAINING, "--epochs=3")
    assert resumed.returncode == 0, resumed.stderr
    assert re.findall(r"epoch +(\d+)/3", resumed.stdout) == ["3"]

    folder = lab.folder / "results"
    pulled = lab.ddpctl("pull", "night", "--into", str(folder))
    assert pulled.returncode == 0, pulled.stderr
    run = lab.boxes[0].home / ".ddpctl/runs/night"
    newest = max((run / "checkpoints").glob("step-*.pt"))
    assert (folder / "checkpoints" / newest.name).read_bytes() == newest.read_bytes()
    assert [(folder / f"node-{node}/node.log").read_text() for node in (0, 1)] == [lab.log("night", n) for n in (0, 1)]
    refused = lab.ddpctl("rm", "night")
    assert (refused.returncode, run.exists()) == (2, True)  # the other run uses its checkpoints
    assert lab.ddpctl("rm", "night", "more").returncode == 0
    assert not [path for each in lab.boxes for path in each.home.glob(".ddpctl/runs/*/*")]
    assert json.loads(lab.ddpctl("ps", "--json").stdout) == []


def test_killed_launcher_changes_nothing_and_another_machine_attaches(lab: Lab) -> None:
    launched = lab.start("launch", "--name", "night", *FOREVER)
    lab.until(launched, lambda: re.search(r"epoch +1/", lab.log("night")), "the first epoch")
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait(20)
    before = lab.log("night").count("epoch ")
    wait_until(lambda: lab.log("night").count("epoch ") > before, "another epoch")

    follower = lab.start("logs", "-f", "--tail", "1", "night")
    lab.until(follower, lambda: lab.output().count("epoch ") > 1, "the followed log")
    os.killpg(follower.pid, signal.SIGINT)
    assert follower.wait(30) == 130
    assert json.loads(lab.ddpctl("status", "night", "--json").stdout)["state"] == "training"

    shutil.copytree(lab.folder / "runs/night", lab.folder / "elsewhere/night")
    other = {"DDPCTL_STATE_DIR": str(lab.folder / "elsewhere")}
    attached = lab.start("attach", "night", "--tail", "1", machine=lab.machines[1], **other)
    lab.until(attached, lambda: lab.output().count("epoch ") > 1, "the log")
    hosts = json.loads(lab.ddpctl("hosts", "--json").stdout)
    assert [(host["failure"], [run["run"] for run in host["cpu_runs"]]) for host in hosts] == [("", ["night"])] * 2
    top = json.loads(lab.ddpctl("top", "night", "--once", "--json").stdout)
    assert (top["state"], top["silent"]) == ("training", [])
    assert [(row["rank"], row["node"]) for row in top["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert all(row["step_s"] for row in top["ranks"])
    inside = lab.ddpctl("exec", "night", "--node", "1", "--", "uname", "-n")
    assert (inside.returncode, inside.stdout) == (0, f"{lab.machines[1].name}\n")
    stopped = lab.ddpctl("stop", "night")
    assert stopped.returncode == 0, stopped.stderr
    assert attached.wait(60) == 143, lab.output()
    status = json.loads(lab.ddpctl("status", "night", "--json").stdout)
    assert (status["state"], status["code"]) == ("stopped", 143)
    checkpoints = lab.boxes[0].home / ".ddpctl/runs/night/checkpoints"
    assert (checkpoints / f"step-{status['outcome']['step']:08}.pt").exists()
    assert lab.alive("night") == {}


def test_launch_waits_for_gpus_that_another_run_has(lab: Lab) -> None:
    lab.write(hosts=addresses(lab, 0))
    text = (lab.folder / "ddpctl.yaml").read_text()
    (lab.folder / "ddpctl.yaml").write_text(re.sub(r"(?m)^job: .*$", "job: {name: hold, gpus: 2}", text))
    home = lab.boxes[0].home
    (home / "hold.py").write_text(HOLD)
    (home / "end").mkdir()
    assert lab.ddpctl("launch", "--detach", "--name", "first", "--", "hold.py").returncode == 0
    try:
        log = home / ".ddpctl/runs/first/node-0/rank-0.log"
        wait_until(lambda: log.exists() and "GPU-node-1-0,GPU-node-1-1" in log.read_text(), "the first run's GPUs")
        (host,) = json.loads(lab.ddpctl("hosts", "--json").stdout)
        assert [gpu["run"] for gpu in host["gpus"]] == ["first", "first"]
        refused = lab.ddpctl("launch", "--name", "second", "--", "hold.py")
        assert (refused.returncode, "'first'" in refused.stderr) == (69, True)
        waiting = lab.start("launch", "--wait", "10m", "--name", "third", "--", "hold.py")
        lab.until(waiting, lambda: "0 of 2 free" in lab.output(), "its place in the queue")
        assert json.loads(lab.ddpctl("hosts", "--json").stdout)[0]["waiting"] == ["third"]
    finally:
        for run in ("first", "third"):
            (home / "end" / run).touch()
    assert waiting.wait(120) == 0, lab.output()
    assert "sees GPU-node-1-0,GPU-node-1-1" in lab.output()


def test_lost_hosts_are_replaced_by_spares_and_a_copy_of_the_checkpoint(lab: Lab) -> None:
    """A spare takes node 1's place and copies; node 0's host is lost too: the resumed run goes on from the copy."""
    lab.write(hosts=addresses(lab, 0, 1, 2, 3))
    text = (lab.folder / "ddpctl.yaml").read_text()
    text = text.replace("device: cpu}", "device: cpu, join_timeout: 300, checkpoint_copies: 2}")
    (lab.folder / "ddpctl.yaml").write_text(text)
    training = ("--epochs=4", "--checkpoint-every=10")  # 45 steps an epoch
    program = ("--", "--deterministic", *training)
    copied = lab.boxes[2].home / f".ddpctl/runs/night/{CHECKPOINTS}/{COPY}"
    launched = lab.start("launch", "--name", "night", *program)
    try:
        lab.until(launched, lambda: re.search(r"epoch +1/", lab.log("night")), "the first epoch", timeout_s=180)
        lab.machines[1].cut()
        lab.machines[1].kill()
        lab.until(launched, lambda: "started (attempt 2)" in lab.log("night"), "the spare", timeout_s=180)
        lab.until(launched, copied.exists, "the spare's copy", timeout_s=180)
        hosts = re.findall(rf"node 1 .*{lab.boxes[2].address}.*{lab.boxes[1].address}", lab.output())
        assert len(hosts) == 1, lab.output()
        lab.machines[0].cut()
        lab.machines[0].kill()
        assert launched.wait(180) != 0
        resumed = lab.ddpctl("launch", "--resume", "night", "--name", "again", *program, timeout=300)
        assert resumed.returncode == 0, resumed.stderr
        for lost in (0, 1):
            assert f"{lab.boxes[lost].address} is not used: " in resumed.stderr
        copy = re.search(r"copy of step (\d+) on ([\d.]+\d)", resumed.stderr)
        assert copy, resumed.stderr
        assert copy[2] == lab.boxes[2].address
        assert f"continuing at step {int(copy[1]) + 1} of" in resumed.stdout
        folders = [lab.boxes[number].home / f".ddpctl/runs/night/{CHECKPOINTS}" for number in (2, 3)]
        assert [json.loads((folder / COPY).read_text())["step"] for folder in folders] == [180, 180]
        assert len({(folder / "step-00000180.pt").read_bytes() for folder in folders}) == 1
        assert weights(resumed.stdout) == exact.undisturbed((1, 4), training)
    finally:
        for number in (0, 1):
            lab.machines[number].plug_in()
            lab.boxes[number].start()  # sshd, which the loss of the machine has killed


def test_spare_takes_over_node_0_with_nobody_attached(lab: Lab) -> None:
    """Node 0's host is lost. A spare is elected, fetches the copy of the checkpoints, and trains on with the others."""
    lab.write(hosts=addresses(lab, 0, 1, 2, 3), text="")
    path = lab.folder / "ddpctl.yaml"
    job = "nodes: 3, spares: 1, gpus: 1, device: cpu, checkpoint_copies: 2}"
    path.write_text(path.read_text().replace("nodes: 2, gpus: 2, device: cpu}", job))
    training = ("--epochs=8", "--checkpoint-every=10")
    options = ("--detach", "--name", "night", "-e", "SLOW=/none")  # else it may be over before its log was looked at
    launched = lab.ddpctl("launch", *options, "--", str(PACED), "--deterministic", *training)
    assert launched.returncode == 0, launched.stderr
    copied = lab.boxes[1].home / f".ddpctl/runs/night/{CHECKPOINTS}/{COPY}"
    try:
        wait_until(lambda: re.search(r"epoch +1/", lab.log("night")) and copied.exists(), "a copy", timeout_s=180)
        waiting = json.loads((lab.boxes[3].home / ".ddpctl/runs/night/node-3/node.json").read_text())
        assert (waiting["state"], waiting["node"]) == ("spare", 3)
        lab.machines[0].cut()
        lab.machines[0].kill()
        wait_until(lambda: "started (attempt 2)" in lab.log("night", 3), "the spare as node 0", timeout_s=60)
        status = json.loads(lab.ddpctl("status", "night", "--json").stdout)
        assert [status["node_reports"][3]["state"][key] for key in ("node", "attempt")] == [0, 2]
        wait_until(lambda: not lab.alive("night"), "the end", timeout_s=180)
        ended = json.loads(lab.ddpctl("status", "night", "--json").stdout)
        assert (ended["state"], ended["code"], ended["outcome"]["attempt"]) == ("succeeded", 0, 2)
        assert weights(lab.log("night", 3)) == exact.undisturbed((1, 3), training)
        assert re.search(r"continuing at step (?!1 )", lab.log("night", 3))
        events = json.loads(lab.ddpctl("timeline", "night", "--json").stdout)["events"]
        took = [event for event in events if event["event"] == "took_place"]
        assert [(event["node"], event["machine"], event["epoch"]) for event in took] == [(0, 3, 1)]
    finally:
        lab.machines[0].plug_in()
        lab.boxes[0].start()


def test_secret_reaches_the_ranks_and_no_file_log_or_process_list(lab: Lab) -> None:
    """The script is in the project, which ddpctl sends."""
    canary = "canary-7c1f0e"
    project = lab.folder / "project"
    project.mkdir()
    (project / "show.py").write_text(
        "import hashlib, os, pathlib, time\n"
        "print(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
        "while not (pathlib.Path.home() / 'seen').exists():\n    time.sleep(0.1)\n"
    )
    lab.write(hosts=addresses(lab, 0), options="    project: sync\n")
    text = (
        (lab.folder / "ddpctl.yaml")
        .read_text()
        .replace("nodes: 2, gpus: 2, device: cpu}", "gpus: 2, device: cpu, secrets: [TOKEN]}")
    )
    (project / "ddpctl.yaml").write_text(text)
    environ = {**lab.environ(), "TOKEN": canary}
    launch = lab.laptop.command(*CLI, "launch", "--name", "night")
    dry = subprocess.run([*launch, "--dry-run", "--", "show.py"], env=environ, cwd=project, capture_output=True,
                         text=True, timeout=60)  # fmt: skip
    assert dry.returncode == 0, dry.stderr
    with (lab.folder / "output.txt").open("wb") as file:
        launched = subprocess.Popen([*launch, "--", "show.py"], env=environ, cwd=project, stdout=file, stderr=file)
    digest = hashlib.sha256(canary.encode()).hexdigest()
    lab.until(launched, lambda: lab.output().count(digest) == 2, "the ranks")
    processes = subprocess.run(["ps", "axww"], capture_output=True, text=True, timeout=20, check=True).stdout
    files = [path for path in lab.folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    (lab.boxes[0].home / "seen").touch()
    assert launched.wait(60) == 0, lab.output()
    assert ("show.py" in processes, canary in processes) == (True, False)
    assert (files, canary in lab.output(), canary in dry.stdout + dry.stderr) == ([], False, False)
