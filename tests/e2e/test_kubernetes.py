"""ddpctl on Kubernetes, as processes, with a kubectl that stands in for a cluster: what it leaves, however it ends."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tests import forks
from tests.e2e.driver import DDPCTL, ROOT, ddpctl, wait_until
from tests.e2e.kubernetes_standin import StandIn, make_standin
from tests.in_process import ddpctl as in_process
from tests.terminal import Session
from tests.unit.ddpctl.test_profile import check_chrome_trace

from ddpwire import history, log_record
from ddpwire.events import EVENTS, EventLog
from ddpwire.run_files import runtime_files

LAUNCH = ("launch", "-t", "kubernetes", "--kind", "pytorchjob", "--nodes", "2")
KEPT = ["networkpolicy.dawn", "secret.dawn"]  # what a run has beside its job


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    found = make_standin(tmp_path / "cluster")
    for name, value in found.env.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def dawn(cluster: StandIn, tmp_path: Path) -> Path:
    """The folder of a run on two pods with a claim, as its nodes have written it."""
    (tmp_path / "ddpctl.yaml").write_text(
        "job: {nodes: '2', mounts: ['pvc=runs:/runs']}\ntarget: lab\n"
        "targets: {lab: {kind: kubernetes, workload: pytorchjob}}\n"
    )
    began = time.time()
    done = ddpctl("launch", "--name", "dawn", "--detach", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = cluster.folder / "disk/dawn"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/step-000001.pt").write_bytes(random.Random(1).randbytes(300_000))
    for node in (0, 1):
        (folder / f"node-{node}").mkdir()
        events = EventLog(folder / f"node-{node}" / EVENTS, node=node)
        names = ("node_started", "preflight_done", "rendezvous_done", "training_began", "first_step", "training_ended")
        for number, name in enumerate((*names, "node_ended")):
            events.emit(name, ago_s=began - time.time() + 60 - 10 * number, code=0)
        row = history.line(began, {"ddp_last_step": 7.0})
        (folder / f"node-{node}" / history.HISTORY).write_text(f"{history.HEADER}\n{row}\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_pull_reads_the_pods_and_when_they_are_gone_their_claim(cluster: StandIn, dawn: Path, tmp_path: Path) -> None:
    done = ddpctl("pull", "dawn")
    assert done.returncode == 0, done.stderr
    assert contents(Path(done.stdout.strip())) == contents(dawn)
    (cluster.folder / "objects/pytorchjob.dawn").unlink()
    done = ddpctl("pull", "dawn", "--into", str(tmp_path / "claim"))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "claim") == contents(dawn)
    assert cluster.objects() == KEPT  # the pod that has read the claim is gone
    record = json.loads((tmp_path / "runs/dawn/run.json").read_text())
    record["job"]["mounts"] = []
    (tmp_path / "runs/dawn/run.json").write_text(json.dumps(record | {"created": 1.0}))
    assert ddpctl("pull", "dawn").returncode == 66
    status = in_process("status", "dawn").stdout
    assert "/runs/dawn" not in status
    assert "ddpctl logs" not in status


def test_ranks_in_pods_are_explained_and_profiled(cluster: StandIn, dawn: Path, tmp_path: Path) -> None:
    """The pods' commands reach the folder of two real ddpruns, whose rank 1 sleeps while the others wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    hang = (str(ROOT / "bench/explain_cases/cases.py"), "sleeps")
    ddprun, quiet = ("-m", "ddprun", *options), {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    nodes = [
        forks.start([*ddprun, f"--node-rank={node}", f"--run-dir={dawn}", *hang], env=os.environ, **quiet)
        for node in (0, 1)
    ]
    found: dict[str, object] = {}

    def explained() -> bool:
        found.update(json.loads(ddpctl("explain", "dawn", "--json").stdout or "{}"))
        return found.get("cause") == "missing"

    try:
        wait_until(lambda: len(runtime_files(dawn, "heartbeat/rank-*.group")) == 4, "the ranks", timeout_s=200)
        wait_until(explained, "the hang", timeout_s=200)
        assert (found["rank"], found["node"], found["unknown"]) == (1, 0, [])
        done = ddpctl("profile", "dawn", "--seconds", "1", "-o", str(tmp_path / "trace.json.gz"), "--json")
        assert done.returncode == 0, done.stderr
        seen = json.loads(done.stdout)
        assert (seen["slowest"], seen["unknown"], sorted(seen["shares"])) == (1, [], ["0", "1", "2", "3"])
        check_chrome_trace((tmp_path / "trace.json.gz").read_bytes())
    finally:
        for node in nodes:
            node.terminate()
        for node in nodes:
            node.wait(60)


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_the_timeline_of_a_run_whose_pods_are_deleted(cluster: StandIn, dawn: Path, *, ended: bool) -> None:
    def timeline() -> dict[str, object]:
        told = json.loads(ddpctl("timeline", "dawn", "--json").stdout)
        return {key: value for key, value in told.items() if key not in ("state", "code", "message")}

    before = timeline()
    assert before["events"]
    if ended:  # the pods' disks are gone; what ddprun has put into their logs is left
        cluster.end({node: log_record.pack(dawn / f"node-{node}") for node in (0, 1)})
        assert timeline() == before
    assert ddpctl("stop", "dawn").returncode == 0
    assert cluster.objects() == []
    assert timeline() == before


def followers(cluster: StandIn) -> int:
    return sum("log_follower" in line for line in cluster.processes().values())


@pytest.mark.parametrize("end", ["TERM", "HUP", "KILL", "terminal"])
def test_what_follows_the_pods_ends_with_its_ddpctl(cluster: StandIn, end: str) -> None:
    """SIGTERM to a launch ends its run; one that is lost otherwise, with its terminal, leaves it."""
    verbs = (*LAUNCH, "--name", "dawn"), ("logs", "-f", "dawn")
    if end == "terminal":
        sessions = []
        for verb in verbs:
            sessions.append(Session([*DDPCTL, *verb]))
            sessions[-1].wait_for("[node1 rank0] epoch 1/9")
        assert followers(cluster) == 2
        for session in reversed(sessions):
            session.close()
    else:
        reader, writer = os.pipe()
        started = []
        with os.fdopen(reader) as lines:
            for verb in verbs:
                started.append(subprocess.Popen([*DDPCTL, *verb], stdout=writer, stderr=writer))
                next(line for line in lines if line == "[node1 rank0] epoch 1/9\n")
            os.close(writer)
            assert followers(cluster) == 2
            for process in started:
                process.send_signal(signal.Signals[f"SIG{end}"])
            assert [process.wait(60) for process in started] == [{"TERM": 143, "HUP": 143, "KILL": -9}[end]] * 2
            lines.read()  # nobody holds the pipe open
    wait_until(lambda: not cluster.processes(), "all to end")
    assert cluster.objects() == ([] if end == "TERM" else ["networkpolicy.dawn", "pytorchjob.dawn", "secret.dawn"])


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_left_of_a_launch_that_was_interrupted(cluster: StandIn, tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    call, edge = choose.randint(1, 11), choose.choice(("begin", "end"))
    sent = choose.choice(("KILL", "KILL", "INT", "TERM"))
    (tmp_path / "train.py").touch()
    cluster.kill_at(call, edge, sent)
    done = ddpctl(*LAUNCH, "--name", "dawn", "--detach", "--", "train.py", cwd=tmp_path)
    assert done.returncode == {"KILL": -9, "INT": 130, "TERM": 143}[sent], (call, edge, sent, done.stderr)
    wait_until(lambda: not cluster.processes(), "its kubectl to end")
    cluster.kill_at(0, "", "")
    (cluster.folder / "view").write_text("{}")  # kubectl's own context is another by now
    known = (
        tmp_path / "runs/dawn/run.json"
    ).exists()  # else it was killed before it made anything, or has taken it back
    stopped = in_process("stop", "dawn")
    assert stopped.returncode == (0 if known else 66), stopped.stderr
    assert cluster.objects() == []


def test_another_users_objects_survive_the_stop_of_an_interrupted_launch(cluster: StandIn, tmp_path: Path) -> None:
    cluster.kill_at(7, "end", "KILL")  # it has made its NetworkPolicy or its Secret, or both
    assert ddpctl(*LAUNCH, "--name", "dawn", "--detach").returncode == -signal.SIGKILL
    wait_until(lambda: not cluster.processes(), "its kubectl to end")
    cluster.kill_at(0, "", "")
    assert {*cluster.objects()} in ({KEPT[0]}, {KEPT[1]}, {*KEPT})
    uid = json.loads((tmp_path / "runs/dawn/run.json").read_text())["uid"]
    theirs = {"pytorchjob.dawn": "    ddpctl.uid: f00dfeed0000\n", "configmap.dawn": ""}
    for name, label in theirs.items():
        text = f"metadata:\n  name: dawn\n  labels:\n    ddpctl.run: dawn\n{label}spec: {{note: {uid}}}\n"
        (cluster.folder / "objects" / name).write_text(text)
    stopped = in_process("stop", "dawn")
    assert stopped.returncode == 0, stopped.stderr
    assert cluster.objects() == sorted(theirs)


def test_stop_takes_away_what_an_interrupted_stop_has_left(cluster: StandIn) -> None:
    assert ddpctl(*LAUNCH, "--name", "dawn", "--detach").returncode == 0
    # After two calls of its status, three to keep its events, and five for what is its own.
    cluster.kill_at(cluster.calls() + 11, "end", "KILL")
    assert ddpctl("stop", "dawn").returncode == -signal.SIGKILL
    assert cluster.objects() == KEPT
    assert in_process("status", "dawn").stdout.startswith("dawn  stopped")
    assert in_process("stop", "dawn").returncode == 0
    assert cluster.objects() == []


def test_a_launch_that_cannot_be_taken_back_keeps_its_record(cluster: StandIn) -> None:
    (cluster.folder / "away").write_text("7")  # the cluster is gone after the judgement and the first object
    assert ddpctl(*LAUNCH, "--name", "dawn", "--detach").returncode == 69
    assert cluster.objects() in ([KEPT[0]], [KEPT[1]])
    (cluster.folder / "away").unlink()
    assert in_process("stop", "dawn").returncode == 0
    assert cluster.objects() == []
