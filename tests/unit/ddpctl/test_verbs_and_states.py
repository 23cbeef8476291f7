"""Each verb in each state that a run can be in, on Slurm, SSH and Kubernetes: its exit code, and no traceback.

The answers are recorded or those of stand-ins: squeue and its like, kubectl, and hosts that are folders of this
machine, on which the scripts that ddpctl sends do run. On this machine itself: tests/e2e/test_verbs_and_states.py.
"""

import json
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
from tests.in_process import Ended
from tests.in_process import ddpctl as call
from tests.unit.ddpctl.kubernetes_lab import DATA, run_of
from tests.unit.ddpctl.test_kubernetes_cli import KUBECTL
from tests.wording import Wording

from ddpctl import executor, launcher, run_store
from ddpctl.command import UNREACHED, Command, Output, process_line
from ddpctl.commands import explain
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec
from ddpwire.run_files import NodeState, Outcome

SYSTEM = {"PATH": "/usr/bin:/bin"}
JOB = JobSpec(nodes="2", gpus=1, grace=5, command=("train.py",))
SQUEUE = """#!/bin/bash
read -r state reason <"$WORLD/queue"
case $state in
  down) echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' && exit 1 ;;
  forgotten) echo 'slurm_load_jobs error: Invalid job id specified' && exit 1 ;;
esac
case $* in
  *%F*) echo "7|N/A|$state|$reason|N/A|" ;;
  *%N) [[ $state != RUNNING ]] || echo node-0 ;;
  *) echo "$state|$reason|N/A|" ;;
esac
"""
# A job that is told to stop ends as its nodes do.
SCANCEL = """#!/bin/bash
read -r state _ <"$WORLD/queue"
[[ $state == down ]] && exit 1
echo 'CANCELLED None' >"$WORLD/queue"
"""
# A node's ddprun: it holds the lock, and saves and ends when it is told.
DDPRUN = """
exec 9>ddprun.lock
flock 9
trap 'cp ../stopped.json outcome.json; exit' TERM INT
touch ready
while :; do sleep 0.05 9>&-; done
"""
GONE = "the connection was lost (the host is gone)"
STOPPED = Outcome(code=143, cause="stopped", message="stopped by SIGTERM: the ranks have saved", retry=True)
OUTCOMES = {
    "succeeded": Outcome(code=0, cause="ok", message="every rank exited with 0"),
    "failed": Outcome(code=3, cause="error", message="rank 1 exited with 3", node=1, rank=1),
    "stopped": STOPPED,
}


class World:
    """A state directory with one run, night, and whatever answers for it."""

    kind: str

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.bin = folder / "bin"
        self.bin.mkdir()
        (folder / "train.py").touch()
        self.monkeypatch = monkeypatch
        self.closing = ExitStack()
        self.program("sleep", "#!/bin/sh\nexec /bin/sleep 0.01\n")
        self.prepare()

    def prepare(self) -> None:
        raise NotImplementedError

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def record(self) -> Run:
        raise NotImplementedError

    def enter(self, state: str) -> None:
        raise NotImplementedError

    def bring_into(self, state: str) -> None:
        folder = run_store.create(self.runs, "night")
        run = replace(self.record(), folder=str(folder))
        if state in ("launching", "interrupted"):
            launch = (
                "exec 8>launch.lock; flock 8; echo $$ $(uname -n) >launch.lock; touch launched;"
                "trap 'rm -r ../night; exit' TERM; while :; do sleep 0.05 8>&-; done"
            )
            process = subprocess.Popen(["/bin/bash", "-c", launch], cwd=folder, env=SYSTEM)
            self.closing.callback(end, process)
            wait_for(folder / "launched")
            (folder / "launched").unlink()
            if state == "interrupted":
                process.kill()
                process.wait()
            run = replace(run, handle={})
        run_store.save(run)
        self.enter(state)

    def nodes(self, folder: Path, state: str, numbers: tuple[int, ...] = (0, 1)) -> None:
        """What the nodes of a run in that state have left in its folder."""
        for number in numbers:
            node = folder / f"node-{number}"
            node.mkdir(parents=True, exist_ok=True)
            (node / "node.log").write_text(f"[rank{number}]: epoch 1\n")
            NodeState(run="night", node=number, pid=4194303, state="training", started=1000.0).write(node)
            if state in OUTCOMES:
                OUTCOMES[state].write(node)
        (folder / "job.log").write_text("slurm: job 7\n")

    def ddpctl(self, *words: str) -> Ended:
        path = f"{self.bin}:/usr/bin:/bin"
        return call(*words, cwd=self.folder, PATH=path, WORLD=str(self.folder), CLUSTER=str(self.folder),
                    DDPCTL_STATE_DIR=str(self.runs), PYTHONPATH=":".join(sys.path))  # fmt: skip


class Slurm(World):
    kind = "slurm"
    queue: ClassVar = {
        "pending": "PENDING Resources",
        "starting": "RUNNING None",
        "training": "RUNNING None",
        "succeeded": "COMPLETED None",
        "failed": "FAILED NonZeroExitCode",
        "stopped": "CANCELLED None",
        "lost": "forgotten",
        "unknown": "down",
    }

    def prepare(self) -> None:
        self.program("sbatch", "#!/bin/sh\necho 'sbatch: Job 8 to start at 2026-11-23T12:00:00' >&2\n")
        for name, text in (("squeue", SQUEUE), ("scancel", SCANCEL), ("sacct", "#!/bin/sh\n")):
            self.program(name, text)
        self.program("scontrol", "#!/bin/sh\nprintf 'node-0\\nnode-1\\n'\n")
        self.program("srun", "#!/bin/sh\nexit 0\n")

    def record(self) -> Run:
        folder = str(self.runs / "night")
        return Run(
            name="night", created=1000.0, target="hpc", kind="slurm", options={}, job=JOB, cwd=str(self.folder),
            folder=folder, checkpoint_dir=f"{folder}/checkpoints", version="0.1.0",
            handle={"job": "7", "dir": folder, "workdir": str(self.folder)},
        )  # fmt: skip

    def enter(self, state: str) -> None:
        (self.folder / "queue").write_text(self.queue.get(state, "forgotten") + "\n")
        if state not in ("launching", "interrupted", "pending", "starting"):
            self.nodes(self.runs / "night", state)


def test_a_waiting_job_is_cancelled_and_has_no_ranks_that_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    world = Slurm(tmp_path, monkeypatch)
    world.bring_into("pending")
    done = world.ddpctl("stop", "night")
    assert (done.returncode, "to save" in done.stderr) == (0, False)
    wording(done.stderr)


@pytest.mark.parametrize("words", [(), ("--timestamps",), ("--rank", "1"), ("--rank", "9")], ids=" ".join)
@pytest.mark.parametrize("state", ["pending", "stopped"])
def test_a_job_that_has_not_started_has_no_log(
    state: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    """It waits in the queue, or was cancelled there."""
    world = Slurm(tmp_path, monkeypatch)
    world.bring_into("pending")
    (world.folder / "queue").write_text(f"{Slurm.queue[state]}\n")
    done = world.ddpctl("logs", "night", *words)
    assert (done.returncode, " yet" in done.stderr) == (66, state == "pending" and "9" not in words)
    wording(done.stderr)


def test_a_printed_command_for_a_task_prints_only_this_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    world = Slurm(tmp_path, monkeypatch)
    world.program("squeue", "#!/bin/sh\nprintf '7|%s|FAILED|NonZeroExitCode|N/A|\\n' 0 2\n")
    world.bring_into("pending")
    array = replace(world.record(), handle=world.record().handle | {"tasks": ["0", "2"]})
    run_store.save(replace(array, options={"array": "0,2"}))
    for task, state in (("0", "succeeded"), ("2", "failed")):
        world.nodes(world.runs / "night" / f"task-{task}", state)
        for rank in (0, 1):
            (world.runs / "night" / f"task-{task}" / f"node-{rank}" / f"rank-{rank}.log").write_text(f"task {task}\n")
    (world.runs / "night/task-2/checkpoints").mkdir()
    (world.runs / "night/task-2/checkpoints/step-00000001.pt").touch()
    printed = []
    for said in (world.ddpctl("status", "night", "--task", "2").stdout, *closing_lines(world)):
        printed += re.findall(r"^  (?:read|resume with)  +ddpctl ([^,\n]*)", said, re.MULTILINE)
    read = "logs night --task 2 --rank 1"
    assert printed == [read, "launch --resume night --array 2", read]
    capfd.readouterr()
    assert world.ddpctl(*shlex.split(read)).returncode == 0
    assert capfd.readouterr().out == "[node1 rank1] task 2\n"
    resumed = world.ddpctl(*shlex.split(printed[1]), "--dry-run")
    assert (resumed.returncode, "#SBATCH --array=2\n" in resumed.stdout) == (0, True)


def closing_lines(world: World) -> list[str]:
    """Return what attach prints about the run when it has ended."""
    said: list[str] = []
    environ = {"PATH": f"{world.bin}:/usr/bin:/bin", "DDPCTL_STATE_DIR": str(world.runs)}
    context = replace(launcher.open_context(environ), emit=said.append)
    run = run_store.load(world.runs, "night")
    (state,) = launcher.status(context, (run,))
    explain.emit_end(context, run, state, 3)
    return said


class Ssh(World):
    kind = "ssh"

    def prepare(self) -> None:
        for name in ("capture", "stream", "hand_over"):
            self.monkeypatch.setattr(executor.Remote, name, lambda _, command: self.on_host(command))
        self.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')

    def on_host(self, command: Command) -> Output:
        assert command.host is not None
        home = self.folder / command.host.address
        if not home.is_dir():
            if command.mode == "stream":  # as Remote.stream does
                sys.stderr.write(f"{command.host}: {GONE}\n")
            return Output(returncode=UNREACHED, stderr=GONE)
        environ = {"HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            ["/bin/sh", "-c", process_line(command)],
            input=command.stdin, env=environ, cwd=home, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        if command.mode == "stream":
            sys.stdout.write(done.stdout)
        return Output(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def record(self) -> Run:
        hosts = [{"address": "box0"}, {"address": "box1"}]
        options = {"hosts": hosts, "runtime": "none", "project": "none", "python": str(self.bin / "python")}
        return Run(
            name="night", created=1000.0, target="boxes", kind="ssh", options=options, job=JOB, cwd=str(self.folder),
            folder=str(self.runs / "night"), checkpoint_dir="box0:~/.ddpctl/runs/night/checkpoints", version="0.1.0",
            handle={"port": "1", "address": "box0", "logs": "ddpctl logs night"},
        )  # fmt: skip

    def enter(self, state: str) -> None:
        for number in (0, 1):
            run = self.folder / f"box{number}/.ddpctl/runs/night"
            if state != "unknown":
                (self.folder / f"box{number}").mkdir()
                (self.folder / f"box{number}/train.py").touch()
            if state in ("launching", "interrupted", "unknown"):
                continue
            self.nodes(run, state, (number,))
            if state == "training":
                (run / "stopped.json").write_text(json.dumps(vars(STOPPED)))
                node = run / f"node-{number}"
                process = subprocess.Popen(["/bin/bash", "-c", DDPRUN], cwd=node, env=SYSTEM)
                self.closing.callback(end, process)
                NodeState(run="night", node=number, pid=process.pid, state="training", started=1000.0).write(node)
                wait_for(node / "ready")


class Kubernetes(World):
    kind = "kubernetes"
    # The recorded answers to `get` of the job and of its pods, and their run's name there.
    recorded: ClassVar = {
        "pending": ("created-pending", "pending-gpu", "pend-gpu"),
        "training": ("running", "running", "run2"),
        "suspended": ("suspended", "suspended-none", "run2"),
        "succeeded": ("succeeded", "succeeded", "succ"),
        "failed": ("failed-exitcode", "failed-exitcode", "fail-exit"),
    }

    def prepare(self) -> None:
        self.program("kubectl", KUBECTL)
        (self.folder / "--raw").write_text((DATA / "misc/raw-apis-kubeflow-v1.json").read_text())
        context = {"name": "lab", "context": {"namespace": "ml"}}
        (self.folder / "view").write_text(json.dumps({"current-context": "lab", "contexts": [context]}))

    def record(self) -> Run:
        return run_of("night")

    def enter(self, state: str) -> None:
        if state == "unknown":
            self.program("kubectl", "#!/bin/sh\ncat >&2 <<'SAID'\n"
                         + (DATA / "bad/api-unreachable-get.stderr.txt").read_text() + "SAID\nexit 1\n")  # fmt: skip
        if state not in self.recorded:
            return
        job, pods, old = self.recorded[state]
        for what, path in (("pytorchjobs.kubeflow.org", f"jobs/{job}"), ("pods", f"pods/{pods}")):
            answer = json.loads((DATA / f"{path}.json").read_text().replace(f'"{old}', '"night'))
            for thing in answer.get("items", [answer]):
                thing["metadata"].setdefault("labels", {})["ddpctl.run"] = "night"
            (self.folder / what).write_text(json.dumps(answer))


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


VERBS = {
    "status": ("status", "night"),
    "ps": ("ps",),
    "logs": ("logs", "night", "--tail", "5"),
    "exec": ("exec", "night", "--", "true"),
    "attach": ("attach", "night"),
    "resume": ("launch", "--resume", "night", "--dry-run"),
    "pull": ("pull", "night"),
    "timeline": ("timeline", "night"),
    "report": ("report", "night"),
    "top": ("top", "night", "--once"),
    "rm": ("rm", "night", "--dry-run"),
    "suspend": ("suspend", "night"),
    "stop": ("stop", "night"),
    "after": ("status", "night"),
}
# By the state that is said, the exit code of each verb; None: it would follow the run, or fetch by OpenSSH's client
# (tests/cluster/test_ssh_pull.py). After "launching" there is no run any more: its launch has taken it back.
GOING, OVER = (0, 0, 0, 0, None, 2, 78, 0, 0, 0, 2, 78, 0, 0), (0, 0, 0, 66, 66, 0, 78, 0, 0, 0, 0, 2, 0, 0)
SSH_GOING, SSH_OVER = (*GOING[:6], None, *GOING[7:]), (*OVER[:6], None, *OVER[7:])
KUBERNETES_OVER = (*OVER[:6], 66, *OVER[7:])
LAUNCHING = (0, 0, 66, 69, 69, 2, 66, 0, 0, 0, 2, 69, 0, 66)
INTERRUPTED = (0, 0, 66, 66, 66, 0, 66, 0, 0, 0, 0, 2, 0, 0)
TABLE: dict[str, dict[str, tuple[str, tuple[int | None, ...]]]] = {
    "slurm": {
        "launching": ("starting", LAUNCHING),
        "interrupted": ("lost", INTERRUPTED),
        "pending": ("pending", (0, 0, 66, 69, None, 2, 78, 0, 0, 0, 2, 78, 0, 0)),
        "starting": ("starting", (0, 0, 66, 0, None, 2, 78, 0, 0, 0, 2, 78, 0, 0)),
        "training": ("running", GOING),
        "succeeded": ("succeeded", OVER),
        "failed": ("failed", OVER),
        "stopped": ("stopped", OVER),
        "lost": ("lost", OVER),
        "unknown": ("unknown", (0, 0, 0, 69, 69, 69, 78, 0, 0, 0, 69, 78, 69, 0)),
    },
    "ssh": {
        "launching": ("starting", LAUNCHING),
        "interrupted": ("lost", INTERRUPTED),
        "training": ("running", SSH_GOING),
        "succeeded": ("succeeded", SSH_OVER),
        "failed": ("failed", SSH_OVER),
        "stopped": ("stopped", SSH_OVER),
        "lost": ("lost", SSH_OVER),
        "unknown": ("unknown", (0, 0, 69, 69, 69, 69, None, 0, 0, 0, 69, 78, 69, 0)),
    },
    "kubernetes": {
        "launching": ("starting", LAUNCHING),
        "interrupted": ("lost", INTERRUPTED),
        "pending": ("starting", (0, 0, 66, 0, None, 2, 66, 0, 0, 0, 2, 0, 0, 0)),
        "training": ("running", (0, 0, 0, 0, None, 2, 66, 0, 0, 0, 2, 0, 0, 0)),
        "suspended": ("suspended", (0, 0, 66, 66, None, 2, 66, 0, 0, 0, 2, 0, 0, 0)),
        "succeeded": ("succeeded", KUBERNETES_OVER),
        "failed": ("failed", KUBERNETES_OVER),
        "unknown": ("unknown", (0, 0, 69, 69, None, 69, 69, 69, 69, 69, 69, 69, 69, 0)),  # attach: it tries for 120 s
    },
}
AFTER = {"pending": "stopped", "starting": "stopped", "training": "stopped", "suspended": "stopped"}


@pytest.mark.parametrize(("kind", "state"), [(kind, state) for kind in TABLE for state in TABLE[kind]])
def test_every_verb_in_this_state(
    kind: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "SILENT_S", 0.0)
    monkeypatch.setattr(explain, "ANSWER_S", 1.0)  # no node of a stand-in answers
    world = {"slurm": Slurm, "ssh": Ssh, "kubernetes": Kubernetes}[kind](tmp_path, monkeypatch)
    said, codes = TABLE[kind][state]
    found: dict[str, int | None] = {}
    with world.closing:
        world.bring_into(state)
        assert json.loads(world.ddpctl("status", "night", "--json").stdout)["state"] == said
        for verb, code in zip(VERBS, codes, strict=True):
            if code is None:
                found[verb] = None
                continue
            done = world.ddpctl(*VERBS[verb])
            printed = capfd.readouterr()
            words = done.stdout + done.stderr + printed.out + printed.err
            found[verb] = done.returncode
            assert "None" not in words, words
            assert not done.returncode or words.strip(), f"{verb}: exit code {done.returncode} in silence"
            assert done.stderr.count("\n") < 20, "one reason, not a traceback"
        assert found == dict(zip(VERBS, codes, strict=True))
        if state != "launching":
            now = json.loads(world.ddpctl("status", "night", "--json").stdout)["state"]
            assert now == AFTER.get(state, said)
