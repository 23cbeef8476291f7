"""ddpctl on Kubernetes: the objects that it makes, and what it leaves of them, however it ends."""

import json
import re
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import yaml
from tests.contract.ddpctl.worlds import Kubernetes, World
from tests.in_process import Ended

from ddpctl.runs import run_store

KEPT = ["networkpolicy.night", "secret.night"]  # what a run has beside its job and its files
DETACHED = ("launch", "--detach", "--name", "night")


@pytest.fixture
def cluster(world: Callable[[str], World]) -> Kubernetes:
    return cast(Kubernetes, world("kubernetes"))


@pytest.fixture
def still(cluster: Kubernetes) -> Kubernetes:
    """A cluster whose pods are no processes: its job runs for as long as it is there."""
    (cluster.cluster / "state").write_text("running")
    return cluster


def interrupt(cluster: Kubernetes, *arguments: str, call: int, edge: str, number: str) -> int:
    """Call ddpctl as a process, and send it a signal at this call of kubectl. Return how it ends."""
    cluster.kill_at(call, edge, number)
    process = cluster.start(*arguments)
    process.communicate(timeout=60)
    cluster.wait_for(cluster.is_over)
    cluster.kill_at(0, "", "")
    return process.returncode


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_attached_launch_prints_each_line_once_although_it_sees_the_pods_run_and_end(cluster: Kubernetes) -> None:
    launch = cluster.start("launch", "--name", "night", "--", "train.py", "steps=2", "wait=go")
    cluster.wait_for(lambda: cluster.has(0, "rank-0.log", "step 2") and cluster.has(1, "rank-1.log", "step 2"))
    cluster.wait_for(lambda: sum(call.startswith("logs") for call in cluster.calls()) >= 2)
    cluster.go()
    stdout, stderr = launch.communicate(timeout=60)
    assert launch.returncode == 0, stderr
    lines = [line for line in stdout.splitlines() if "step" in line]
    assert sorted(lines) == [f"[node{rank} rank{rank}] step {step}" for rank in (0, 1) for step in (1, 2)]


def test_a_launch_makes_each_object_once_and_no_record_has_its_secret(still: Kubernetes) -> None:
    assert still.launch("wait").returncode == 0
    assert still.objects() == ["configmap.night", "networkpolicy.night", "pytorchjob.night", "secret.night"]
    created = [call for call in still.calls() if call.startswith("create")]
    judged = [call for call in created if "--dry-run=server" in call]
    assert (len(judged), len(created)) == (3, 7)
    secret = re.search(r"store\.secret: '?(\w{64})", (still.cluster / "objects/secret.night").read_text())
    assert secret is not None
    written = [path.read_text() for path in (still.runs / "night").rglob("*") if path.is_file()]
    assert written
    assert secret[1] not in "".join((*written, *still.calls()))


def test_status_has_a_row_for_each_pod(cluster: Kubernetes) -> None:
    cluster.enter("pending")
    reports = cluster.json("status", "night")["node_reports"]
    lines = cluster.ddpctl("status", "night").stdout.splitlines()[-2:]
    for node, line, report in zip((0, 1), lines, reports, strict=True):
        assert report["note"].startswith(f"night-worker-{node}: ")
        assert " ".join(line.split()).startswith(f"{node} {report['note']}")


def test_suspended_pods_save_and_a_resumed_run_has_new_ones(cluster: Kubernetes) -> None:
    cluster.enter("training")
    pods = cluster.node_pids()
    assert cluster.ddpctl("suspend", "night").returncode == 0
    assert cluster.state() == "suspended"
    assert [cluster.outcome(node)["code"] for node in (0, 1)] == [143, 143]
    assert cluster.ddpctl("resume", "night").returncode == 0
    cluster.wait_for(lambda: not {*pods} & {*cluster.node_pids()})
    cluster.wait_for(lambda: cluster.has(0, "node.json", '"training"') and cluster.has(1, "node.json", '"training"'))
    assert cluster.state() == "running"
    patches = [call.partition("--patch ")[2] for call in cluster.calls() if call.startswith("patch pytorchjobs")]
    assert [json.loads(patch)["spec"] for patch in patches] == [
        {"runPolicy": {"suspend": suspended}} for suspended in (True, False)
    ]
    assert cluster.ddpctl("stop", "night").returncode == 0


def test_pull_reads_the_pods_and_when_they_are_gone_their_claim(cluster: Kubernetes, tmp_path: Path) -> None:
    cluster.enter("stopped")
    disk = cluster.cluster / "disk/night"
    (cluster.cluster / "state").write_text("running")
    done = cluster.ddpctl("pull", "night")
    assert done.returncode == 0, done.stderr
    pulled = contents(cluster.runs / "night/output")
    assert pulled.items() <= contents(disk).items()
    assert {"node-0/outcome.json", "node-1/rank-1.log", "checkpoints/step-00000002.pt"} <= pulled.keys()
    (cluster.cluster / "objects/pytorchjob.night").unlink()
    done = cluster.ddpctl("pull", "night", "--into", str(tmp_path / "claim"))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "claim") == pulled
    assert "pod.night-pull" not in "".join(cluster.objects())  # the pod that has read the claim is gone
    record = run_store.load(cluster.runs, "night")
    run_store.save(replace(record, created=1.0, job=replace(record.job, mounts=())))
    assert cluster.ddpctl("pull", "night").returncode == 66


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_the_timeline_outlives_the_pods(cluster: Kubernetes, *, ended: bool) -> None:
    def timeline() -> list[object]:
        return list(cluster.json("timeline", "night")["events"])

    cluster.enter("succeeded" if ended else "training")
    before = timeline()
    assert before
    if ended:  # the pods' disks are gone; what ddprun has put into their logs is left
        subprocess.run(["/bin/rm", "-r", str(cluster.cluster / "disk")], check=True)
        assert timeline() == before
    assert cluster.ddpctl("stop", "night").returncode == 0
    assert cluster.objects() == []
    assert timeline()[: len(before)] == before


@pytest.mark.parametrize("kill", [False, True], ids=["saves", "is killed"])
def test_logs_and_outcome_outlive_a_stop(cluster: Kubernetes, *, kill: bool) -> None:
    cluster.enter("training")
    assert cluster.ddpctl("stop", "night", *["--kill"] * kill).returncode == 0
    subprocess.run(["/bin/rm", "-r", str(cluster.cluster / "disk")], check=True)
    for pod in cluster.cluster.glob("log.*"):
        pod.unlink()
    logs = cluster.ddpctl("logs", "night")
    assert logs.returncode == 0, logs.stderr
    assert all(f"[node{node}" in logs.stdout for node in (0, 1))
    assert "ddprun-record" not in logs.stdout
    timed = cluster.ddpctl("logs", "night", "--node", "1", "--timestamps").stdout.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\S+Z \[node1", line) for line in timed)
    shown = cluster.json("status", "night")
    assert (shown["state"], shown["code"]) == ("stopped", 143)
    if not kill:
        assert logs.stdout.count("stopped by SIGTERM") == 2  # the last line of each node
        outcomes = [json.loads((cluster.runs / f"night/node-{node}/outcome.json").read_text()) for node in (0, 1)]
        assert [outcome["code"] for outcome in outcomes] == [143, 143]


def test_a_stopped_run_stays_stopped_while_the_cluster_does_not_answer(still: Kubernetes) -> None:
    assert still.launch("wait").returncode == 0
    assert still.ddpctl("stop", "night").returncode == 0
    (still.cluster / "away").write_text("0")
    assert still.state() == "stopped"


@pytest.mark.parametrize(("number", "code"), [("TERM", 143), ("KILL", -9)])
def test_a_log_follower_ends_with_its_ddpctl(still: Kubernetes, number: str, code: int) -> None:
    """SIGTERM to a launch ends its run; a launch that is lost otherwise, with its terminal, leaves it."""
    started = []
    for verb in (("launch", "--name", "night"), ("logs", "-f", "night")):
        started.append(still.start(*verb))
        output = started[-1].stdout
        assert output is not None
        assert next(line for line in output if "node1" in line) == "[node1 rank0] epoch 1/9\n"
    assert any("log_follower" in line for line in still.processes().values())
    for process in started:
        process.send_signal(signal.Signals[f"SIG{number}"])
    for process in started:
        process.communicate(timeout=60)  # nobody holds the pipe open
    assert [process.returncode for process in started] == [code, code]
    still.wait_for(still.is_over)
    assert still.objects() == ([] if number == "TERM" else ["networkpolicy.night", "pytorchjob.night", "secret.night"])


@pytest.mark.parametrize(
    ("call", "edge", "number", "code"), [(3, "end", "INT", 130), (7, "begin", "TERM", 143), (9, "end", "KILL", -9)]
)
def test_nothing_is_left_of_an_interrupted_launch(
    still: Kubernetes, call: int, edge: str, number: str, code: int
) -> None:
    assert interrupt(still, *DETACHED, "--", "train.py", call=call, edge=edge, number=number) == code
    (still.cluster / "view").write_text("{}")  # kubectl's own context is another by now
    known = (still.runs / "night/run.json").exists()  # else it has taken everything back
    stopped = still.ddpctl("stop", "night")
    assert stopped.returncode == (0 if known else 66), stopped.stderr
    assert still.objects() == []


def test_another_users_objects_survive_the_stop_of_an_interrupted_launch(still: Kubernetes) -> None:
    assert interrupt(still, *DETACHED, call=7, edge="end", number="KILL") == -signal.SIGKILL
    assert {*still.objects()} in ({KEPT[0]}, {KEPT[1]}, {*KEPT})
    uid = json.loads((still.runs / "night/run.json").read_text())["uid"]
    theirs = {"pytorchjob.night": "    ddpctl.uid: f00dfeed0000\n", "configmap.night": ""}
    for name, label in theirs.items():
        text = f"metadata:\n  name: night\n  labels:\n    ddpctl.run: night\n{label}spec: {{note: {uid}}}\n"
        (still.cluster / "objects" / name).write_text(text)
    assert still.ddpctl("stop", "night").returncode == 0
    assert still.objects() == sorted(theirs)


def test_a_second_stop_removes_what_an_interrupted_one_has_left(still: Kubernetes) -> None:
    assert still.ddpctl(*DETACHED).returncode == 0
    # After two calls of its status, five for what is its own, and five to save its events and logs.
    assert interrupt(still, "stop", "night", call=len(still.calls()) + 13, edge="end", number="KILL") == -9
    assert still.objects() == KEPT
    assert still.state() == "stopped"
    assert still.ddpctl("stop", "night").returncode == 0
    assert still.objects() == []


def test_a_launch_that_cannot_be_taken_back_keeps_its_record(still: Kubernetes) -> None:
    (still.cluster / "away").write_text("7")  # the cluster is gone after the judgement and the first object
    assert still.ddpctl(*DETACHED).returncode == 69
    assert still.objects() in ([KEPT[0]], [KEPT[1]])
    (still.cluster / "away").unlink()
    assert still.ddpctl("stop", "night").returncode == 0
    assert still.objects() == []


def test_files_whose_names_suggest_secrets_are_not_sent(still: Kubernetes) -> None:
    """In a folder that is no git repository, where nothing is ignored."""
    for name in ("credentials.json", "secrets.yaml", ".env"):
        (still.folder / name).write_text("canary")
    settings = json.loads((still.folder / "ddpctl.yaml").read_text())
    settings["targets"]["there"]["project"] = ["*"]
    (still.folder / "ddpctl.yaml").write_text(json.dumps(settings))
    done: Ended = still.ddpctl("launch", "--dry-run", "--name", "night", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout
    assert ("[REDACTED]" in done.stdout, "store.secret:" in done.stdout) == (True, False)
    maps = [text for text in done.stdout.split("END_OF_INPUT") if "kind: ConfigMap" in text]
    data = [yaml.safe_load(text[text.index("apiVersion") :])["data"] for text in maps]
    assert [sorted(name.partition("-")[2] for name in files) for files in data] == [["train.py"]]
    assert all(name in done.stderr for name in ("credentials.json", "secrets.yaml", ".env"))
