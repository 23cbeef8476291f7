"""The target ssh with real sshds: a laptop and two machines out of network namespaces, runtime none. Needs root."""

import contextlib
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
from bench.measuring import runtime_files
from tests.cluster.ssh_cluster import CLI, Lab, cluster
from tests.cluster.ssh_lab import ROOT_MISSING, box, fingerprint, make_key
from tests.e2e.driver import PACED, ROOT, SCRIPTS, wait_until
from tests.nightly.ddpctl.test_profile import check_chrome_trace

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
INTERRUPTED = (SCRIPTS / "interrupted.py").read_text()
FOREVER = ("--", str(PACED), "--epochs", "5000")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with cluster(tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture
def lab(built: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    """The lab, without runs of an earlier test; a test that leaves a process behind fails."""
    monkeypatch.setenv("PATH", built.variables["PATH"])
    for folder in (built.folder / "runs", *(each.home / ".ddpctl" for each in built.boxes)):
        shutil.rmtree(folder, ignore_errors=True)
    (built.person.home / ".ssh/config").unlink(missing_ok=True)
    built.write()
    yield built
    names = [path.name for path in (built.folder / "runs").glob("*")]
    remaining = {pid: line for name in names for pid, line in built.alive(name).items()}
    for pid in remaining:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert remaining == {}


def weights(text: str) -> str:
    match = re.search(r"weights sha256 (\w+)", text)
    assert match, text
    return match[1]


def test_a_training_that_was_stopped_elsewhere_goes_on_to_the_same_weights(lab: Lab, tmp_path: Path) -> None:
    checkpoints = exact.stopped_in_the_middle(tmp_path, ranks=4)
    program = ("--", "--deterministic", *exact.DIGITS, "--checkpoint-dir", str(checkpoints))
    resumed = lab.ddpctl("launch", "--name", "night", *program)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    assert "continuing at step " in resumed.stdout
    assert weights(resumed.stdout) == exact.undisturbed((1, 4), exact.DIGITS)


def test_ctrl_c_saves_a_training_and_a_second_one_kills_frozen_ranks(lab: Lab) -> None:
    """Row 19: within the grace and 5 s."""
    launched = lab.start("launch", "--name", "night", *FOREVER)
    wait_until(lambda: re.search(r"epoch +2/", lab.log("night")), "the second epoch")
    os.killpg(launched.pid, signal.SIGINT)
    assert launched.wait(35 + 20) == 130, lab.output()
    assert json.loads(lab.ddpctl("status", "night", "--json").stdout)["code"] == 130
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
    lab.until(launched, lambda: "Ctrl-C" in lab.output(), "the first interrupt")
    os.killpg(launched.pid, signal.SIGINT)
    assert launched.wait(60) == 130, lab.output()
    assert lab.alive("late") == {}


@pytest.mark.parametrize("verb", ["launch", "attach"])
def test_ctrl_c_is_one_keyboard_interrupt_for_each_rank(lab: Lab, verb: str) -> None:
    """Ranks 1 and 2 do not catch it."""
    script = lab.folder / "script.py"
    script.write_text(INTERRUPTED)
    program = ("launch", "--name", "night", "--", str(script))
    if verb == "attach":
        assert lab.ddpctl(*program[:1], "--detach", *program[1:]).returncode == 0
        program = ("attach", "night")
    launched = lab.start(*program)
    wait_until(lambda: lab.output().count("] ready\n") == 4, "the ranks")
    os.killpg(launched.pid, signal.SIGINT)
    launched.wait(60)
    assert launched.returncode == 130, lab.output()
    outcome = json.loads(lab.ddpctl("status", "night", "--json").stdout)["outcome"]
    assert (outcome["code"], outcome["cause"]) == (130, "stopped")
    for rank in range(4):
        path = lab.boxes[rank // 2].home / f".ddpctl/runs/night/node-{rank // 2}/rank-{rank}.log"
        last = "saved\n" if rank in (0, 3) else "\nKeyboardInterrupt\n"
        wait_until(lambda path=path, last=last: path.read_text().endswith(last), f"the end of rank {rank}")
        log = path.read_text()
        assert log == "ready\ninterrupted\nsaved\n" if rank in (0, 3) else log.startswith("ready\nTraceback ")


def test_hang_of_eight_ranks_on_two_nodes_is_explained_and_profiled(
    lab: Lab, record_property: Callable[[str, object], None]
) -> None:
    """On a quiet machine explained within 10 s of the question, which is printed, and not asserted."""
    script = str(ROOT / "bench/explain_cases/cases.py")
    launched = lab.ddpctl(
        "launch", "--detach", "--ranks", "4", "--gpus", "4", "--name", "night", "--", script, "sleeps"
    )
    assert launched.returncode == 0, launched.stderr
    answer: dict[str, object] = {}

    def explained() -> bool:
        started = time.monotonic()
        answer.update(json.loads(lab.ddpctl("explain", "night", "--json").stdout or "{}"))
        answer["took"] = f"{time.monotonic() - started:.1f} s"
        return answer.get("cause") == "missing"

    try:

        def have_met() -> bool:
            runs = lab.folder.glob("*/home/.ddpctl/runs/night")
            return sum(len(runtime_files(run, "heartbeat/rank-*.group")) for run in runs) == 8

        wait_until(have_met, "the ranks", timeout_s=120)
        wait_until(explained, "the hang", timeout_s=120)
        record_property("took", answer["took"])
        assert (answer["state"], answer["rank"], answer["node"], answer["unknown"]) == ("running", 1, 0, [])
        assert "7 ranks " in str(answer["sentence"])
        assert "cases.py" in str(answer["sentence"])
        done = lab.ddpctl("profile", "night", "--seconds", "1", "--json")
        assert done.returncode == 0, done.stderr
        profile = json.loads(done.stdout)
        assert (profile["slowest"], profile["unknown"], len(profile["shares"])) == (1, [], 8)
        check_chrome_trace((lab.folder / profile["trace"]).read_bytes())
    finally:
        lab.ddpctl("stop", "--kill", "night")


def without_numbers(line: str) -> str:
    return re.sub(" +", " ", re.sub(r"[+-]?[0-9][0-9.,:]*", "N", line))


def test_the_guide_from_nothing_to_results(lab: Lab) -> None:
    """Each command of docs/ssh.md, in order, with the output that the page shows but for its numbers."""
    page = (ROOT / "docs/ssh.md").read_text()
    project = lab.folder / "digits"
    project.mkdir()
    subprocess.run(["git", "init", "--quiet", str(project)], check=True, timeout=30)
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
    text = text.replace("~/venv/bin/python", sys.executable).replace("alice@", "")
    (project / "ddpctl.yaml").write_text(text)
    shutil.copy(ROOT / "examples/plain_ddp.py", project)
    hosts = [f"Host box{number}\n  HostName {box.address}\n" for number, box in enumerate(lab.boxes, 1)]
    (lab.person.home / ".ssh/config").write_text("".join(hosts))
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S)
    blocks = [block for language, block in fences if not language]
    assert [block.split()[1] for block in blocks if block.startswith("ddpctl ")] == ["launch", "status", "pull", "rm"]
    output = ""
    for block in blocks:
        if not block.startswith("ddpctl "):
            shown = block.replace("/home/alice", str(lab.folder)).splitlines()
            assert {without_numbers(line) for line in shown} - {"..."} <= {
                without_numbers(line) for line in output.splitlines()
            }
            continue
        argv = lab.laptop.command(*CLI, *shlex.split(block)[1:])
        done = subprocess.run(argv, env=lab.environ(), cwd=project, capture_output=True, text=True, timeout=200)
        output = done.stderr + done.stdout
        assert done.returncode == 0, output
    assert (lab.folder / "results/node-1/node.log").is_file()
    assert not [path for box in lab.boxes for path in box.home.glob(".ddpctl/runs/*/*")]


def test_second_ctrl_c_kills_ranks_that_do_not_end(lab: Lab) -> None:
    script = lab.folder / "script.py"
    script.write_text(INTERRUPTED.replace("sleep(2)", "sleep(300)").replace('"12"', '""'))
    launched = lab.start("launch", "--name", "late", "--", str(script))
    lab.until(launched, lambda: lab.output().count("] ready\n") == 4, "the ranks")
    os.killpg(launched.pid, signal.SIGINT)
    lab.until(launched, lambda: lab.output().count("] interrupted\n") == 4, "the first interrupt")
    os.killpg(launched.pid, signal.SIGINT)
    assert launched.wait(60) == 130, lab.output()
    assert "saved\n" not in lab.output()
    assert lab.alive("late") == {}


def test_every_host_is_judged_and_nothing_is_started(lab: Lab) -> None:
    """Keys refused, host keys unknown and changed, also of a jump host, hosts down: one table of nine hosts."""
    first, second = lab.boxes[:2]
    stranger, impostor = "10.77.1.1", "10.77.1.2"
    lab.machines[0].ip("addr", "add", f"{stranger}/16", "dev", "eth0")
    lab.machines[0].ip("addr", "add", f"{impostor}/16", "dev", "eth0")
    lab.laptop.ip("addr", "add", "10.77.1.10/16", "dev", "eth0")
    other = make_key(lab.folder / "other_key")
    (lab.person.home / ".ssh/config").write_text(f"Host inner\n  HostName {first.address}\n  ProxyJump {stranger}\n")
    with contextlib.ExitStack() as stack:
        boxes = [
            stack.enter_context(
                box(lab.folder / name, lab.person, address=address, machine=lab.machines[0], trusted=False)
            )
            for name, address in (("stranger", stranger), ("impostor", impostor))
        ]
        lab.person.trusts(impostor, other)
        unknown, changed = (fingerprint(each.host_key) for each in boxes)
        lab.write(
            hosts=f"[{first.address}, {second.address}, nobody@{second.address}:22, {stranger}, inner, {impostor}, "
            f"10.77.0.99, {lab.laptop.address}, no-such-host.invalid]"
        )
        refused = lab.ddpctl("launch", "--nodes", "9", "--name", "night")
    assert refused.returncode == 69, refused.stderr
    _, *rows = refused.stderr.splitlines()
    assert [(row.split()[0], row.split()[1], row.endswith("not ready")) for row in rows[1:10]] == [
        (first.address, "yes", False),
        (second.address, "yes", False),
        (second.address, "no", True),
        (stranger, "no", True),
        ("inner", "no", True),
        (impostor, "no", True),
        ("10.77.0.99", "no", True),
        (lab.laptop.address, "no", True),
        ("no-such-host.invalid", "no", True),
    ]
    reasons = dict(row.split(": ", 1) for row in rows[10:])
    assert f"ssh-copy-id -p 22 nobody@{second.address}" in reasons[second.address]
    assert unknown in reasons[stranger]
    assert "known_hosts" in reasons[stranger]
    assert (stranger in reasons["inner"], unknown in reasons["inner"]) == (True, True)
    assert fingerprint(other) in reasons[impostor]
    assert changed in reasons[impostor]
    assert f"ssh-keygen -R {impostor}" in reasons[impostor]
    assert "no route to host" in reasons["10.77.0.99"]
    assert "connection refused" in reasons[lab.laptop.address]
    assert "does not resolve" in reasons["no-such-host.invalid"]

    (lab.person.home / ".ssh/config").write_text(f"Host again\n  HostName {first.address}\n")
    lab.write(hosts=f"[{first.address}, again, {second.address}]")
    refused = lab.ddpctl("launch", "--name", "night", "--nodes", "3")
    assert refused.returncode == 78, refused.stderr
    assert refused.stderr.splitlines()[-1].startswith(f"again: again and {first.address} are the same machine")
    assert not list(lab.folder.glob("*/home/.ddpctl"))
    assert not (lab.folder / "runs/night").exists()
