"""The targets, each with what answers for it on this machine: their nodes are fake nodes that really run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests import forks
from tests.in_process import Ended
from tests.in_process import ddpctl as call
from tests.unit.ddpctl.kaggle_answers import stand_in
from tests.unit.ddpctl.records import run_of

from ddpctl.command import UNREACHED, Command, Output, process_line
from ddpctl.execution import executor
from ddpctl.job.spec import JobSpec
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run
from ddprun.files.process_discovery import is_locked

PROGRAMS = Path(__file__).parent / "programs"
FAKE_NODE = Path(__file__).parents[1] / "fake_node"
DATA = Path(__file__).parents[2] / "data"
PACKAGES = [str(FAKE_NODE), *(str(Path(__file__).parents[3] / name) for name in ("cli", "trainer"))]
# ddpctl as a process, with the same pause between two questions about a lost reply as in the fixture `world`.
IMPATIENT = """\
import runpy
from ddpctl.operations import lost_replies
lost_replies.ANSWER_GAP_S = 0.2
runpy.run_module("ddpctl", run_name="__main__", alter_sys=True)
"""
CAPTURE = executor.Executor._capture
# What the ranks of a run in that state do.
SCRIPTS: Mapping[str, tuple[str, ...]] = {
    "starting": ("start=go",),
    "running": ("wait",),
    "training": ("steps=2", "wait"),
    "stopping": ("steps=2", "wait", "save=go"),
    "succeeded": ("steps=2",),
    "failed": ("steps=2", "exit=3@1"),
    "stopped": ("steps=2", "wait"),
    "lost": ("steps=2", "vanish"),
}


def capture(self: executor.Executor, command: Command) -> Output:
    """Run a command as the executor does; a program in SMALL as a fork of a process that has imported it."""
    if command.argv[1:3] != ("-P", "-m") or command.argv[3] not in forks.SMALL:
        return CAPTURE(self, command)
    env = {name: value for name, value in {**self._environ, **command.env}.items() if name != "PYTHONPATH"}
    return fork(command.argv[2:], env=env, given=command.stdin, timeout=command.timeout_s, cwd=command.cwd)


def fork(arguments: Sequence[str], **options: Any) -> Output:
    done = forks.run(arguments, text=True, **options)
    return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)


class World:
    """A project's folder with the target ``there``, a run named night, and whatever answers for the target."""

    kind: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    job: ClassVar[dict[str, Any]] = {"nodes": 2, "gpus": 1, "device": "cpu", "grace": 30}

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.runs, self.bin = folder / "project", folder / "runs", folder / "bin"
        self.capfd, self.monkeypatch = capfd, monkeypatch
        for path in (self.folder, self.bin):
            path.mkdir()
        (self.folder / "train.py").touch()
        self.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.env = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "PYTHONPATH": os.pathsep.join(PACKAGES),
            "DDPCTL_STATE_DIR": str(self.runs),
            "HOME": str(folder),
        }
        monkeypatch.setattr(executor.Executor, "_capture", capture)
        self.prepare()
        settings = {"job": self.job, "target": "there", "targets": {"there": {"kind": self.kind, **self.options}}}
        (self.folder / "ddpctl.yaml").write_text(json.dumps(settings))

    def prepare(self) -> None:
        """Make what answers for the target."""

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def ddpctl(self, *arguments: str) -> Ended:
        """Call ddpctl in this process; what its child processes print is in the result."""
        self.capfd.readouterr()
        done = call(*arguments, cwd=self.folder, **self.env)
        printed = self.capfd.readouterr()
        return replace(done, stdout=done.stdout + printed.out, stderr=done.stderr + printed.err)

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.ddpctl(*arguments, "--json")
        assert done.stdout, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def state(self) -> str:
        return str(self.json("status", "night")["state"])

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start ddpctl as a process in a session of its own, as a terminal has it."""
        return subprocess.Popen(
            [sys.executable, "-P", "-c", IMPATIENT, *arguments], env=self.env, cwd=self.folder, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def launch(self, *script: str, detach: bool = True) -> Ended:
        detached = ("--detach",) if detach else ()
        return self.ddpctl("launch", *detached, "--name", "night", "--", "train.py", *script)

    def enter(self, state: str) -> None:
        """Bring the run into that state, by what its ranks do."""
        done = self.launch(*SCRIPTS[state])
        assert done.returncode == 0, done.stderr
        if state == "starting":
            self.wait_for(lambda: self.has(0, "node.json") and self.has(1, "node.json"))
        elif state in ("succeeded", "failed", "lost"):
            self.wait_for(lambda: self.has(0, "events.jsonl") and self.is_over())
        else:
            self.wait_for(lambda: self.has(0, "node.json", '"training"') and self.has(1, "node.json", '"training"'))
            if state != "running":
                self.wait_for(lambda: self.has(0, "rank-0.log", "step 2") and self.has(1, "rank-1.log", "step 2"))
        if state in ("stopping", "stopped"):
            self.stop_nodes()
            stopped = "outcome.json" if state == "stopped" else "node.json"
            self.wait_for(lambda: self.has(1, stopped, "stop") and self.has(0, stopped, "stop"))
        if state == "stopped":
            self.wait_for(self.is_over)

    def stop_nodes(self) -> None:
        for pid in self.node_pids():
            os.kill(pid, signal.SIGTERM)

    def node_dir(self, node: int) -> Path:
        return self.runs / "night" / f"node-{node}"

    def has(self, node: int, name: str, text: str = "") -> bool:
        with suppress(OSError):
            return text in (self.node_dir(node) / name).read_text()
        return False

    def outcome(self, node: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads((self.node_dir(node) / "outcome.json").read_text())
        return answer

    def node_pids(self) -> list[int]:
        """The pids of the nodes' ddprun, as they have written them."""
        return [json.loads((self.node_dir(node) / "node.json").read_text())["pid"] for node in (0, 1)]

    def processes(self) -> dict[int, str]:
        """pid → command line of everything alive that has the state directory, or the folder of the cluster."""
        marks = (f"{self.folder.parent}/runs".encode(), f"CLUSTER={self.folder.parent}/cluster".encode())
        lines = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ended = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
                environ = (path / "environ").read_bytes()
                if not ended and int(path.name) != os.getpid() and any(mark in environ for mark in marks):
                    lines[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        # A server of tests/forks.py that a test has started serves later tests as well.
        return {pid: line for pid, line in lines.items() if "tests/forks.py" not in line}

    def is_over(self) -> bool:
        """Return whether nothing of the run is left. A process that exits loses its environment before its lock."""
        return not any(is_locked(self.node_dir(node)) for node in (0, 1)) and not self.processes()

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text()}" for path in self.folder.parent.rglob("*.log"))

    def go(self) -> None:
        """Let ranks go on that wait for the file ``go``."""
        (self.folder / "go").touch()

    def close(self) -> None:
        """End what is left."""
        self.go()
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def answer_again(self) -> None:
        """Let the target answer that has been silent in the state unknown."""

    def interrupted_launch(self, *, alive: bool) -> "subprocess.Popen[bytes] | None":
        """A launch that has a record and no nodes yet: it continues, or was killed."""
        folder = run_store.create(self.runs, "night")
        job = JobSpec(**(self.job | {"nodes": str(self.job.get("nodes", 1))}), command=("train.py", "wait"))
        place = {"cwd": str(self.folder), "folder": str(folder)}
        record = run_of(target="there", kind=self.kind, options=dict(self.options), job=job, uid="c0ffee", **place)
        run_store.save(record)
        if not alive:
            (folder / "launch.lock").touch()
            return None
        text = (
            "exec 8>launch.lock; flock 8; echo $$ $(uname -n) >launch.lock; echo ready;"
            "trap 'rm -r ../night; exit' TERM; exec 7<> <(:) 8>&8; while :; do read -r -t 0.05 -u 7; done"
        )
        launch = subprocess.Popen(["/bin/bash", "-c", text], cwd=folder, stdout=subprocess.PIPE, env=self.env)
        assert launch.stdout is not None
        assert launch.stdout.readline() == b"ready\n"
        return launch


class Local(World):
    kind = "local"


class Ssh(World):
    """Hosts are folders of this machine, in which the scripts that ddpctl sends do run."""

    kind = "ssh"

    def prepare(self) -> None:
        for name in ("capture", "stream", "hand_over"):
            self.monkeypatch.setattr(executor.Remote, name, lambda remote, command: self.on_host(command, remote.keep))
        for host in ("box0", "box1"):
            (self.folder.parent / host).mkdir()
            (self.folder.parent / host / "train.py").touch()
        self.options = {"hosts": [{"address": "box0"}, {"address": "box1"}], "runtime": "none", "project": "none",
                        "python": str(self.bin / "python")}  # fmt: skip

    def node_dir(self, node: int) -> Path:
        return self.folder.parent / f"box{node}/.ddpctl/runs/night/node-{node}"

    def unplug(self, *hosts: str) -> None:
        for host in hosts:
            (self.folder.parent / host).rename(self.folder.parent / f"{host}-gone")

    def answer_again(self) -> None:
        for path in self.folder.parent.glob("box?-gone"):
            path.rename(self.folder.parent / path.name.removesuffix("-gone"))

    def enter(self, state: str) -> None:
        super().enter({"unknown": "training"}.get(state, state))
        if state == "unknown":
            self.unplug("box0", "box1")

    def on_host(self, command: Command, keep: Callable[[bytes], bytes]) -> Output:
        assert command.host is not None
        home = self.folder.parent / command.host.address
        if not home.is_dir():
            message = "the connection was lost (the host is gone)"
            if command.mode == "stream":  # as Remote.stream does
                sys.stderr.write(f"{command.host}: {message}\n")
            return Output(returncode=UNREACHED, stderr=message)
        environ = self.env | {
            "HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "SSH_CONNECTION": "127.0.0.1 4000 127.0.0.1 22",
        }
        done = subprocess.run(
            ["/bin/sh", "-c", process_line(command)], input=command.stdin, env=environ, cwd=home, capture_output=True,
            text=True, timeout=120,
        )  # fmt: skip
        if command.mode == "stream":
            sys.stdout.write(keep(done.stdout.encode()).decode())
        return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def go(self) -> None:
        for host in ("box0", "box1"):
            with suppress(OSError):
                (self.folder.parent / host / "go").touch()


class Slurm(World):
    """Slurm's programs are stand-ins; the batch script that they are given really runs."""

    kind = "slurm"

    def prepare(self) -> None:
        self.options = {"python": str(self.bin / "python"), "requeues": 0}
        (self.folder.parent / "slurm/jobs").mkdir(parents=True)
        self.env["SLURM_WORLD"] = str(self.folder.parent / "slurm")
        for name in ("sbatch", "squeue", "sacct", "scancel", "scontrol", "srun"):
            (self.bin / name).symlink_to(PROGRAMS / "slurm")
        (self.bin / "slurm-run").symlink_to(PROGRAMS / "slurm-run")

    def file(self, name: str) -> Path:
        return self.folder.parent / "slurm" / name

    def answer_again(self) -> None:
        self.file("down").unlink()

    def stop_nodes(self) -> None:
        subprocess.run(["scancel", "--signal=TERM", "7.1"], env=self.env, check=True)

    def enter(self, state: str) -> None:
        if state == "pending":
            self.file("hold").touch()
            assert self.launch("wait").returncode == 0
            return
        super().enter({"unknown": "training"}.get(state, state))
        if state == "unknown":
            self.file("down").touch()
        if state in ("succeeded", "failed", "stopped", "lost"):
            self.wait_for(lambda: self.file("jobs/7/state").read_text().split()[0] not in ("PENDING", "RUNNING"))
        if state == "lost":  # Slurm has forgotten the job
            self.file("jobs/7/state").unlink()


class Kubernetes(World):
    """kubectl is a stand-in: its cluster is a folder, and its pods are fake nodes."""

    kind = "kubernetes"
    options: ClassVar[dict[str, Any]] = {"workload": "pytorchjob"}
    job: ClassVar[dict[str, Any]] = World.job | {"mounts": ["pvc=runs:/runs"]}
    # Recorded answers to `get` of the job and of its pods, and their run's name there.
    recorded: ClassVar[dict[str, tuple[str, str, str]]] = {
        "pending": ("created-pending", "pending-gpu", "pend-gpu"),
        "running": ("running", "running", "running"),
        "suspended": ("suspended", "suspended-none", "susp1"),
        "succeeded": ("succeeded", "succeeded", "succ"),
        "failed": ("failed-exitcode", "failed-exitcode", "failcode"),
    }

    def prepare(self) -> None:
        self.cluster = self.folder.parent / "cluster"
        for name in ("objects", "recorded", "disk"):
            (self.cluster / name).mkdir(parents=True)
        for name in ("kubectl", "start-pods"):
            (self.bin / name).symlink_to(PROGRAMS / name)
        self.env["CLUSTER"] = str(self.cluster)
        context = {"name": "lab", "context": {"namespace": "ml"}}
        (self.cluster / "view").write_text(json.dumps({"current-context": "lab", "contexts": [context]}))
        (self.cluster / "raw").write_text((DATA / "kubernetes/misc/raw-apis-kubeflow-v1.json").read_text())
        for state, (job, pods, name) in self.recorded.items():
            for resource, path in (("pytorchjobs.kubeflow.org", f"jobs/{job}"), ("pods", f"pods/{pods}")):
                text = (DATA / f"kubernetes/{path}.json").read_text()
                answer = json.loads(text.replace(f'"{name}-worker', '"RUN-worker').replace(f': "{name}"', ': "RUN"'))
                for thing in answer.get("items", [answer]):
                    thing["metadata"].setdefault("labels", {})["ddpctl.run"] = "RUN"
                    thing["metadata"]["uid"] = f"uid-{thing['metadata']['name']}"  # the same object in all states
                (self.cluster / f"recorded/{state}.{resource}").write_text(json.dumps(answer))

    def node_dir(self, node: int) -> Path:
        return self.cluster / f"disk/night/node-{node}"

    def answer_again(self) -> None:
        (self.cluster / "away").unlink()

    def enter(self, state: str) -> None:
        if state in ("pending", "suspended"):
            (self.cluster / state).touch()
            assert self.launch("wait").returncode == 0
            return
        super().enter({"unknown": "training", "lost": "training"}.get(state, state))
        if state == "unknown":
            (self.cluster / "away").write_text("0")
        if state == "lost":  # somebody else has deleted it
            record: Run = run_store.load(self.runs, "night")
            run_store.save(replace(record, created=1000.0))
            subprocess.run(["kubectl", "delete", "pytorchjobs.kubeflow.org", "night"], env=self.env, check=True)

    def go(self) -> None:
        (self.cluster / "go").touch()

    def objects(self) -> list[str]:
        """What there is, as KIND.NAME."""
        return sorted(path.name for path in (self.cluster / "objects").iterdir())

    def kill_at(self, call: int, edge: str, number: str) -> None:
        """Send whoever makes this call a signal; ``edge``: begin or end."""
        (self.cluster / "kill").write_text(f"{call} {edge} {number}\n")

    def calls(self) -> list[str]:
        return (self.cluster / "calls").read_text().splitlines()


class Kaggle(World):
    """The client answers as the real one has answered."""

    kind = "kaggle"
    job: ClassVar[dict[str, Any]] = {"gpus": 2}
    answers: ClassVar[dict[str, str]] = {
        "config view": "config-view", "kernels push": "push", "kernels logs": "logs", "kernels output": "output",
    }  # fmt: skip
    recorded: ClassVar[dict[str, str]] = {
        "pending": "queued", "running": "running", "stopping": "cancel_requested", "succeeded": "complete",
        "failed": "error", "stopped": "cancel_acknowledged", "lost": "404",
    }  # fmt: skip

    def prepare(self) -> None:
        self.env["PYTHONPATH"] = os.pathsep.join(PACKAGES[1:])  # the notebook has a wheel of all packages

    def enter(self, state: str) -> None:
        status = f"status-{self.recorded[state]}" if state in self.recorded else "push-no-network"
        logs = "logs-name-error" if state == "failed" else "logs"
        stand_in(self.folder.parent, self.answers | {"kernels status": status, "kernels logs": logs})
        if not (self.runs / "night").exists():
            assert self.launch().returncode == 0


WORLDS: Mapping[str, type[World]] = {world.kind: world for world in (Local, Ssh, Slurm, Kubernetes, Kaggle)}
