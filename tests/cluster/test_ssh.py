"""The target ssh with real sshds: a laptop and two machines out of network namespaces, runtime none. Needs root."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import exact
import pytest
from tests.cluster.ssh_cluster import CLI, Lab, cluster
from tests.cluster.ssh_lab import ROOT_MISSING, box, fingerprint, make_key
from tests.e2e.driver import PACED, ROOT, wait_until
from tests.unit.ddpctl.test_profile import check_chrome_trace

from ddpwire.run_files import runtime_files

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
FOREVER = ("--", str(PACED), "--epochs", "5000")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def lab(built: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The lab, without runs of an earlier test; a test that leaves a process behind fails."""
    monkeypatch.setenv("PATH", built.variables["PATH"])
    for folder in (built.folder / "runs", *(one.home / ".ddpctl" for one in built.boxes)):
        shutil.rmtree(folder, ignore_errors=True)
    (built.person.home / ".ssh/config").unlink(missing_ok=True)
    built.write()
    yield built
    names = [path.name for path in (built.folder / "runs").glob("*")]
    left = {pid: line for name in names for pid, line in built.alive(name).items()}
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == {}


def weights(text: str) -> str:
    match = re.search(r"weights sha256 (\w+)", text)
    assert match, text
    return match[1]


def test_two_machines_train_as_one_does(lab: Lab) -> None:
    """The same weights bit for bit; logs of both nodes; status; nothing left."""
    program = ("--", "--deterministic", *exact.DIGITS)
    there = lab.ddpctl("launch", "--name", "night", *program)
    assert there.returncode == 0, there.stderr + there.stdout
    assert weights(there.stdout) == exact.undisturbed((1, 4), exact.DIGITS)
    assert lab.ddpctl("logs", "night").stdout == lab.log("night", 0) + lab.log("night", 1)
    one = lab.ddpctl("logs", "night", "--rank", "2", "--tail", "1")
    assert re.fullmatch(r"\[node1 rank2\] .*\n", one.stdout) or one.stdout == "", one
    state = json.loads(lab.ddpctl("status", "night", "--json").stdout)
    assert (state["state"], state["code"], state["checkpoint_dir"]) == (
        "succeeded",
        0,
        f"{lab.boxes[0].address}:~/.ddpctl/runs/night/checkpoints",
    )
    again = lab.ddpctl("launch", "--resume", "night", "--name", "more", *program, "--epochs=3")
    assert again.returncode == 0, again.stderr
    assert "epoch  3/3" in again.stdout
    assert "epoch  2/3" not in again.stdout
    spent = json.loads(lab.ddpctl("timeline", "night", "--json").stdout)["seconds"]
    assert list(spent)[:4] == ["start", "preflight", "rendezvous", "import"]
    assert spent["training"] > 0
    written = lab.ddpctl("report", "night", "--output", str(lab.folder / "night.html"))
    assert (written.returncode, written.stderr) == (0, "")
    assert "<h2>Throughput, samples per second</h2>" in (lab.folder / "night.html").read_text()


def test_a_training_that_was_stopped_elsewhere_goes_on_to_the_same_weights(lab: Lab, tmp_path: Path) -> None:
    checkpoints = exact.stopped_in_the_middle(tmp_path, ranks=4)
    program = ("--", "--deterministic", *exact.DIGITS, "--checkpoint-dir", str(checkpoints))
    there = lab.ddpctl("launch", "--name", "night", *program)
    assert there.returncode == 0, there.stderr + there.stdout
    assert "continuing at step " in there.stdout
    assert weights(there.stdout) == exact.undisturbed((1, 4), exact.DIGITS)


def test_every_host_is_judged_and_nothing_is_started(lab: Lab) -> None:
    """Row 18: keys refused, host keys unknown and changed, hosts down: one table within 10 s for 8 hosts."""
    first, second = lab.boxes
    stranger, impostor = "10.77.1.1", "10.77.1.2"
    lab.machines[0].ip("addr", "add", f"{stranger}/16", "dev", "eth0")
    lab.machines[0].ip("addr", "add", f"{impostor}/16", "dev", "eth0")
    lab.laptop.ip("addr", "add", "10.77.1.10/16", "dev", "eth0")
    other = make_key(lab.folder / "other_key")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            box(lab.folder / "stranger", lab.person, address=stranger, machine=lab.machines[0], trusted=False)
        )
        bad = stack.enter_context(
            box(lab.folder / "impostor", lab.person, address=impostor, machine=lab.machines[0], trusted=False)
        )
        lab.person.trusts(impostor, other)
        unknown = fingerprint((lab.folder / "stranger/host_key.pub").read_text())
        lab.write(
            hosts=f"[{first.address}, {second.address}, nobody@{second.address}:22, {stranger}, {impostor}, "
            f"10.77.0.99, {lab.laptop.address}, no-such-host.invalid]"
        )
        started = time.monotonic()
        done = lab.ddpctl("launch", "--nodes", "8", "--name", "night")
        seconds = time.monotonic() - started
    assert done.returncode == 69, done.stderr
    head, *rows = done.stderr.splitlines()
    assert head == "ddpctl: nothing was started: 6 of 8 hosts are not ready"
    assert [(row.split()[0], row.split()[1], row.endswith("not ready")) for row in rows[1:9]] == [
        (first.address, "yes", False),
        (second.address, "yes", False),
        (second.address, "no", True),
        (stranger, "no", True),
        (impostor, "no", True),
        ("10.77.0.99", "no", True),
        (lab.laptop.address, "no", True),
        ("no-such-host.invalid", "no", True),
    ]
    key = lab.person.home / ".ssh/id_ed25519"
    assert rows[9:-1] == [
        f"{second.address}: it accepts no key of nobody (the agent's and {key}): put one there with "
        f"ssh-copy-id -p 22 nobody@{second.address}, or name the right one as key",
        f"{stranger}: its host key ED25519 {unknown} is not in known_hosts: compare it on the machine itself "
        f"(ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub), then trust it with: ssh {stranger}",
        f"{impostor}: its host key has CHANGED (known_hosts has ED25519 {fingerprint(other)}, the host shows "
        f"ED25519 {fingerprint(bad.host_key)}): the machine was reinstalled, or somebody intercepts the connection. If "
        f"the machine was reinstalled, run ssh-keygen -R {impostor}, then ssh {impostor}",
        "10.77.0.99: 10.77.0.99:22 cannot be reached (no route to host): is sshd running there?",
        f"{lab.laptop.address}: {lab.laptop.address}:22 cannot be reached (connection refused): is sshd running there?",
    ]
    assert rows[-1].startswith("no-such-host.invalid: 'no-such-host.invalid' does not resolve: ")
    assert seconds < 30
    (lab.person.home / ".ssh/config").write_text(f"Host again\n  HostName {first.address}\n")
    lab.write(hosts=f"[{first.address}, again, {second.address}]")
    done = lab.ddpctl("launch", "--name", "night", "--nodes", "3")
    (lab.person.home / ".ssh/config").unlink()
    assert done.returncode == 78, done.stderr
    last = f"again: again and {first.address} are the same machine: remove one of the two from hosts"
    assert done.stderr.splitlines()[-1] == last
    assert not list(lab.folder.glob("*/home/.ddpctl"))
    assert not (lab.folder / "runs/night").exists()


def test_ctrl_c_saves_and_stops_and_twice_kills(lab: Lab) -> None:
    """Row 19: within the grace and 5 s."""
    launched = lab.start("launch", "--name", "night", *FOREVER)
    wait_until(lambda: re.search(r"epoch +2/", lab.log("night")), "the second epoch")
    os.killpg(launched.pid, signal.SIGINT)
    launched.wait(35 + 20)
    said = lab.said()
    assert launched.returncode == 130
    assert "stopping run 'night': ranks that are running have 30 s to save; Ctrl-C again kills them\n" in said
    assert "run 'night' stopped, exit code 130" in said
    assert list((lab.boxes[0].home / ".ddpctl/runs/night/checkpoints").iterdir())
    assert lab.alive("night") == {}

    launched = lab.start("launch", "--name", "late", *FOREVER)
    wait_until(lambda: re.search(r"epoch +2/", lab.log("late")), "the second epoch")
    pids = list(lab.alive("late"))
    for pid in pids:  # nobody can save: the second Ctrl-C has to kill
        with contextlib.suppress(ProcessLookupError):
            if PACED.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGSTOP)
    os.killpg(launched.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(launched.pid, signal.SIGINT)
    launched.wait(60)
    said = lab.said()
    assert launched.returncode == 130
    assert "killing run 'late'\n" in said
    assert lab.alive("late") == {}


INTERRUPTED = Path(__file__).parents[1] / "e2e/scripts/interrupted.py"


@pytest.mark.parametrize("verb", ["launch", "attach"])
def test_ctrl_c_is_one_keyboard_interrupt_for_each_rank(lab: Lab, verb: str) -> None:
    """Ranks 1 and 2 do not catch it."""
    script = lab.folder / "script.py"
    script.write_text(INTERRUPTED.read_text())
    program = ("launch", "--name", "night", "--", str(script))
    if verb == "attach":
        assert lab.ddpctl(*program[:1], "--detach", *program[1:]).returncode == 0
        program = ("attach", "night")
    launched = lab.start(*program)
    wait_until(lambda: lab.said().count("] ready\n") == 4, "the ranks")
    os.killpg(launched.pid, signal.SIGINT)
    launched.wait(60)
    said = lab.said()
    assert launched.returncode == 130
    assert "run 'night' stopped, exit code 130" in said
    for rank in range(4):
        path = lab.boxes[rank // 2].home / f".ddpctl/runs/night/node-{rank // 2}/rank-{rank}.log"
        last = "saved\n" if rank in (0, 3) else "\nKeyboardInterrupt\n"
        wait_until(lambda path=path, last=last: path.read_text().endswith(last), f"the end of rank {rank}")
        log = path.read_text()
        assert log == "ready\ninterrupted\nsaved\n" if rank in (0, 3) else log.startswith("ready\nTraceback ")


def test_a_killed_launcher_changes_nothing_and_another_machine_attaches(lab: Lab) -> None:
    launched = lab.start("launch", "--name", "night", *FOREVER)
    wait_until(lambda: re.search(r"epoch +1/", lab.log("night")), "the first epoch")
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait(20)
    before = lab.log("night").count("epoch ")
    wait_until(lambda: lab.log("night").count("epoch ") > before + 2, "more epochs")

    followed = lab.start("logs", "-f", "--tail", "1", "night")
    wait_until(lambda: lab.said().count("epoch ") > 2, "the followed log")
    os.killpg(followed.pid, signal.SIGINT)
    assert followed.wait(30) == 130
    own = [line for line in lab.said().splitlines() if not line.startswith("[node")]
    assert own == ["run 'night' keeps running; ddpctl stop night stops it"]

    shutil.copytree(lab.folder / "runs/night", lab.folder / "elsewhere/night")
    other = {"DDPCTL_STATE_DIR": str(lab.folder / "elsewhere")}
    attached = lab.start("attach", "night", "--tail", "1", machine=lab.machines[1], **other)
    wait_until(lambda: lab.said().count("epoch ") > 2, "the log")
    hosts = json.loads(lab.ddpctl("hosts", "--json").stdout)
    assert [(one["failure"], [run["run"] for run in one["cpu_runs"]]) for one in hosts] == [("", ["night"])] * 2
    seen = json.loads(lab.ddpctl("top", "night", "--once", "--json").stdout)
    assert (seen["state"], seen["silent"]) == ("training", [])
    assert [(row["rank"], row["node"]) for row in seen["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert all(row["step_s"] for row in seen["ranks"])
    inside = lab.ddpctl("exec", "night", "--node", "1", "--", "uname", "-n")
    assert (inside.returncode, inside.stdout) == (0, f"{lab.machines[1].name}\n")
    stopped = lab.ddpctl("stop", "night")
    assert stopped.returncode == 0, stopped.stderr
    assert attached.wait(60) == 143, lab.said()
    assert lab.alive("night") == {}


def test_a_hang_of_eight_ranks_on_two_nodes_is_explained_and_profiled(
    lab: Lab, record_property: Callable[[str, object], None]
) -> None:
    """On a quiet machine explained within 10 s of the question, which is printed, and not asserted."""
    script = str(ROOT / "bench/explain_cases/cases.py")
    launched = lab.ddpctl(
        "launch", "--detach", "--ranks", "4", "--gpus", "4", "--name", "night", "--", script, "sleeps"
    )
    assert launched.returncode == 0, launched.stderr
    found: dict[str, object] = {}

    def explained() -> bool:
        started = time.monotonic()
        found.update(json.loads(lab.ddpctl("explain", "night", "--json").stdout or "{}"))
        found["took"] = f"{time.monotonic() - started:.1f} s"
        return found.get("cause") == "missing"

    try:
        runs = "*/home/.ddpctl/runs/night"
        wait_until(
            lambda: sum(len(runtime_files(run, "heartbeat/rank-*.group")) for run in lab.folder.glob(runs)) == 8,
            "the ranks",
            timeout_s=120,
        )
        wait_until(explained, "the hang", timeout_s=120)
        record_property("took", found["took"])
        assert (found["state"], found["rank"], found["node"], found["unknown"]) == ("running", 1, 0, [])
        assert "7 ranks have been waiting" in str(found["sentence"])
        assert "cases.py" in str(found["sentence"])
        done = lab.ddpctl("profile", "night", "--seconds", "1", "--json")
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert (seen["slowest"], seen["unknown"], len(seen["shares"])) == (1, [], 8)
        check_chrome_trace((lab.folder / seen["trace"]).read_bytes())
    finally:
        lab.ddpctl("stop", "--kill", "night")


def test_a_secret_is_nowhere(lab: Lab) -> None:
    canary = "canary-7c1f0e"
    script = "import os, time, hashlib\nprint(hashlib.sha256(os.environ['TOKEN'].encode()).hexdigest(), flush=True)\n"
    (lab.folder / "project").mkdir(exist_ok=True)
    (lab.folder / "project/show.py").write_text(script + "time.sleep(3)\n")
    lab.write(options="    project: sync\n")
    text = (lab.folder / "ddpctl.yaml").read_text().replace("device: cpu}", "device: cpu, secrets: [TOKEN]}")
    (lab.folder / "project/ddpctl.yaml").write_text(text)
    asked = lab.laptop.command(*CLI, "launch", "--name", "night", "--", "show.py")
    environ = {**lab.environ(), "TOKEN": canary}
    dry = subprocess.run([*asked[:-4], "--dry-run", "--", "show.py"], env=environ, cwd=lab.folder / "project",
                         capture_output=True, text=True, timeout=60)  # fmt: skip
    assert dry.returncode == 0, dry.stderr
    listed = ""
    with (lab.folder / "said.txt").open("wb") as file:
        launched = subprocess.Popen(asked, env=environ, cwd=lab.folder / "project", stdout=file, stderr=file)
    while launched.poll() is None:
        listed += subprocess.run(["ps", "axww"], capture_output=True, text=True, timeout=20).stdout
        time.sleep(0.2)
    said = lab.said()
    assert said.count(hashlib.sha256(canary.encode()).hexdigest()) == 4, said
    written = [path for path in lab.folder.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]
    assert (written, canary in listed, canary in said, canary in dry.stdout) == ([], False, False, False)


def without_numbers(line: str) -> str:
    return re.sub(" +", " ", re.sub(r"[+-]?[0-9][0-9.,:]*", "N", line))


def test_the_guide_from_nothing_to_results(lab: Lab) -> None:
    """Each command of docs/two_boxes.md, in order, with the output that the page shows but for its numbers."""
    page = (ROOT / "docs/two_boxes.md").read_text()
    project = lab.folder / "digits"
    project.mkdir()
    subprocess.run(["git", "init", "--quiet", str(project)], check=True, timeout=30)
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    text = text.replace("~/venv/bin/python", sys.executable).replace("alice@", "")
    (project / "ddpctl.yaml").write_text(text)
    shutil.copy(ROOT / "examples/plain_ddp.py", project)
    hosts = [f"Host box{number}\n  HostName {one.address}\n" for number, one in enumerate(lab.boxes, 1)]
    (lab.person.home / ".ssh/config").write_text("".join(hosts))
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    blocks = [block for language, block in fences if not language]
    assert [block.split()[1] for block in blocks if block.startswith("ddpctl ")] == ["launch", "status", "pull", "rm"]
    said = ""
    for block in blocks:
        if not block.startswith("ddpctl "):
            shown = block.replace("/home/alice", str(lab.folder)).splitlines()
            assert {without_numbers(line) for line in shown} - {"..."} <= {
                without_numbers(line) for line in said.splitlines()
            }
            continue
        argv = lab.laptop.command(*CLI, *shlex.split(block)[1:])
        done = subprocess.run(argv, env=lab.environ(), cwd=project, capture_output=True, text=True, timeout=200)
        said = done.stderr + done.stdout
        assert done.returncode == 0, said
    assert (lab.folder / "results/node-1/node.log").is_file()
    assert not [path for one in lab.boxes for path in one.home.glob(".ddpctl/runs/*/*")]
