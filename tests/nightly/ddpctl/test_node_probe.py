"""A look into nodes: the shell's text, run by real shells against a real endpoint, and every target's command lines."""

import json
import os
import subprocess
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from tests.unit.ddpctl import test_slurm_target
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.kubernetes_lab import KUBECTL, as_run, lines, run_of
from tests.unit.ddpctl.ssh_answers import OPTIONS, RUN, by_host
from tests.unit.ddpctl.test_local import PATH, node
from tests.unit.ddpctl.test_local import url as url

from ddpctl.command import Output
from ddpctl.execution.node_probe import Probe, ProbeResult, probe_script, read_probe
from ddpctl.targets.kubernetes.options import KubernetesOptions
from ddpctl.targets.kubernetes.target import KubernetesTarget
from ddpctl.targets.ssh.target import SshTarget


def test_the_failure_of_a_node_that_does_not_answer(tmp_path: Path) -> None:
    folder = node(tmp_path / "node-0", "http://127.0.0.1:9/metrics")
    done = subprocess.run(
        ["/bin/sh"],
        input=probe_script(Probe(), [str(folder)]),
        env={"PATH": PATH},
        capture_output=True,
        text=True,
        timeout=30,
    )
    (seen,) = read_probe(Output(returncode=0, stdout=done.stdout), (0,))
    assert seen.metrics == ""
    assert "http://127.0.0.1:9/metrics" in seen.failure


def test_a_fifo_keeps_nobody_waiting(tmp_path: Path) -> None:
    for name in ("node.json", "history.csv"):
        os.mkfifo(tmp_path / name)
    text = probe_script(Probe(files=("history.csv",)), [str(tmp_path)])
    done = subprocess.run(["/bin/sh"], input=text, capture_output=True, text=True, timeout=30)
    (seen,) = read_probe(Output(returncode=done.returncode, stdout=done.stdout), (0,))
    assert (seen.metrics, seen.files, seen.failure) == ("", {}, "")
    assert seen.time is not None, "also if PATH is empty"


def test_kubernetes_asks_in_every_pod_that_runs() -> None:
    target, run = KubernetesTarget(KubernetesOptions()), run_of()
    running = as_run("pods/running", "digits-otter", "running")
    answer = json.loads(running.stdout)
    for pod in answer["items"]:
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-20T09:07:06Z"}
        pod["status"]["conditions"] = [scheduled]
    running = replace(running, stdout=json.dumps(answer))
    up = Output(returncode=0, stdout="\n\x1e=0\n\n\x1e=time\n12\n")
    forbidden = Output(returncode=1, stderr="Error from server (Forbidden): no exec\n")
    pods: dict[str, Answer] = {"worker-0 --container": up, "worker-1 --container": forbidden, "": running}
    commands, seen = perform(target.probe(run, Probe()), pods)
    execs = matching(commands, " exec ")
    assert lines(tuple(execs)) == [
        f"{KUBECTL.removesuffix(' --request-timeout=30s')} exec --stdin digits-otter-worker-{node} "
        "--container pytorch -- sh"
        for node in range(2)
    ]
    assert [command.stdin for command in execs] == [
        probe_script(Probe(), (f'"$DDP_RUN_DIR/node-{node}"',)) for node in range(2)
    ]
    assert [(probe.node, probe.time, probe.failure) for probe in seen] == [
        (0, 12.0, ""),
        (1, None, "Error from server (Forbidden): no exec"),
    ]
    placed = datetime.fromisoformat("2026-11-20T09:07:06Z").timestamp()
    assert [result.placed for result in seen] == [(placed,), (placed,)]


def test_of_a_pod_that_has_ended_there_is_its_log() -> None:
    target, run = KubernetesTarget(KubernetesOptions()), run_of()
    ended = as_run("pods/succeeded", "digits-otter", "succeeded")
    log, gone = Output(returncode=0, stdout="[node0] done\n"), Output(returncode=1, stderr="no such pod\n")
    nothing_kept = Output(returncode=0, stdout="\n\x1e=0\n\n\x1e=1\n")
    pods = {"logs succ-worker-0": log, "logs succ-worker-1": gone, "kubectl": ended, "": nothing_kept}
    commands, seen = perform(target.probe(run, Probe(metrics=False)), pods)
    assert lines(tuple(matching(commands, " logs "))) == [
        f"{KUBECTL} logs succ-worker-{node} --container pytorch --tail=2000" for node in range(2)
    ]
    assert seen[0].files == {"node.log": "[node0] done\n"}
    assert (seen[0].metrics, "ended" in seen[0].failure) == ("", True)
    assert (seen[1].files, seen[1].failure) == ({}, "no such pod")


def test_ssh_asks_every_host_for_its_own() -> None:
    down = Output(returncode=255, stderr="box2: no route\n")
    up = Output(returncode=0, stdout="\n\x1e=0\n\n\x1e=time\n12.5\n\n\x1ehistory.csv\ntime\n")
    commands, results = perform(SshTarget(OPTIONS).probe(RUN, Probe(files=("history.csv",))), {"": by_host(up, down)})
    assert [(str(command.host), command.argv) for command in commands] == [
        ("box1", ("/bin/sh",)),
        ("box2", ("/bin/sh",)),
    ]
    assert [command.stdin for command in commands] == [
        probe_script(Probe(files=("history.csv",)), (f'"$HOME"/.ddpctl/runs/night/node-{node}',)) for node in range(2)
    ]
    assert results == (
        ProbeResult(node=0, time=12.5, files={"history.csv": "time"}),
        ProbeResult(node=1, failure="box2: no route"),
    )


def test_slurm_asks_the_login_node_once() -> None:
    output = Output(returncode=0, stdout="\n\x1e=0\n\n\x1e=time\n12\n\n\x1e=placed\n7\n9\n\n\x1e=1\n\n\x1e=time\n13\n")
    target = test_slurm_target.SlurmTarget(test_slurm_target.DEFAULTS)
    commands, results = perform(target.probe(test_slurm_target.RUN, Probe(placed=True)), {"": output})
    command = only(commands)
    assert command.argv == ("sh",)
    assert command.stdin is not None
    assert [line for line in command.stdin.splitlines() if line.startswith("if cd")] == [
        "if cd /r/night/node-0 2>/dev/null; then",
        "if cd /r/night/node-1 2>/dev/null; then",
    ]
    assert results == (ProbeResult(node=0, time=12.0, placed=(7.0, 9.0)), ProbeResult(node=1, time=13.0))
    array = replace(test_slurm_target.RUN, handle={"job": "7", "tasks": ["0", "1"]})
    with pytest.raises(test_slurm_target.ConfigError) as error:
        perform(target.probe(array, Probe()), {})
    assert ("--task" in str(error.value), "0, 1" in str(error.value)) == (True, True)
