"""The target ssh with real containers: two machines out of namespaces, each with an sshd and a Docker of its own."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.lab import Machine, machines
from tests.cluster.docker_lab import IMAGE, PATH, answers, docker, environ, unmount
from tests.cluster.ssh_lab import PACKAGES, ROOT_MISSING, Box, Person, box
from tests.e2e.driver import SCRIPTS, wait_until

pytestmark = [pytest.mark.skipif(bool(ROOT_MISSING), reason=ROOT_MISSING or ""), pytest.mark.timeout(1800)]
CLI = (sys.executable, "-P", "-m", "ddpctl")


@dataclass
class Dock:
    """A machine with an sshd and a dockerd."""

    machine: Machine
    box: Box
    folder: Path
    env: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Its dockerd, in the machine's network but not in its own /sys, where there would be no cgroups."""
        network = ["nsenter", f"--net=/run/netns/{self.machine.namespace}"]
        argv = ["dockerd", f"--data-root={self.folder}/data", f"--exec-root={self.folder}/exec",
                f"--pidfile={self.folder}/pid", f"--host=unix://{self.folder}/docker.sock",
                "--bridge=none", "--iptables=false", "--ip6tables=false"]  # fmt: skip
        with (self.folder / "dockerd.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*network, *argv], env={"PATH": PATH}, stdout=log, stderr=log, start_new_session=True
            )
        wait_until(lambda: answers(self.env), "dockerd", timeout_s=90)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None
            unmount(self.folder)


@dataclass
class Lab:
    folder: Path
    laptop: Machine
    docks: tuple[Dock, ...]
    variables: dict[str, str]

    def ddpctl(self, *args: str, timeout: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
        argv = self.laptop.command(*CLI, *args)
        env = {**self.variables, **more}
        return subprocess.run(argv, env=env, cwd=self.folder, capture_output=True, text=True, timeout=timeout)

    def containers(self) -> str:
        return "".join(docker(dock.env, "ps", "--all", "--format", "{{.Names}}\n").stdout for dock in self.docks)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, packed_image: Path) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("docks")
    person = Person(folder / "me")
    with machines(3, prefix="docks") as made, contextlib.ExitStack() as stack:
        laptop, *rest = made
        docks = []
        for machine in rest:
            own = Path(tempfile.mkdtemp(prefix="dock-"))  # short: containerd's sockets lie deep in it
            variables = {"DOCKER_HOST": f"unix://{own}/docker.sock"}
            host_box = box(folder / machine.name, person, address=machine.address, machine=machine, environ=variables)
            dock = Dock(
                machine=machine, box=stack.enter_context(host_box), folder=own, env=environ(own / "docker.sock")
            )
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            stack.callback(dock.stop)
            dock.start()
            docker(dock.env, "load", "--input", str(packed_image), timeout_s=300)
            docks.append(dock)
        hosts = ", ".join(dock.box.address for dock in docks)
        (folder / "ddpctl.yaml").write_text(
            f"job: {{name: digits, nodes: 2, gpus: 2, device: cpu, shm: 64Mi, image: '{IMAGE}'}}\ntarget: boxes\n"
            f"targets: {{boxes: {{kind: ssh, hosts: [{hosts}]}}}}\n"
        )
        variables = {"HOME": str(person.home), "PATH": PATH, "PYTHONPATH": PACKAGES,
                     "DDPCTL_STATE_DIR": str(folder / "runs")}  # fmt: skip
        yield Lab(folder=folder, laptop=laptop, docks=tuple(docks), variables=variables)


def test_two_containers_train_as_one_machine_does(lab: Lab) -> None:
    """>= 98 % on real digits, and bit for bit the weights of four ranks in one container of the same image."""
    program = ("-m", "ddptrain", "--epochs", "10", "--deterministic")
    done = lab.ddpctl("launch", "--name", "night", "--", *program)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy +([\d.]+) %", done.stdout)
    assert accuracy
    assert float(accuracy[1]) >= 98
    assert {"[node0]", "[node1]"} <= set(re.findall(r"^\[node\d\]", done.stdout, re.M))
    argv = ("run", "--rm", "--network=host", IMAGE, "--nproc-per-node", "4", *program)
    alone = docker(lab.docks[0].env, *argv, timeout_s=300).stdout
    sums = re.findall(r"weights sha256 (\w+)", done.stdout + alone)
    assert len(sums) == 2
    assert sums[0] == sums[1]
    wait_until(lambda: lab.containers() == "", "the end of the containers", timeout_s=60)
    run = lab.docks[0].box.home / ".ddpctl/runs/night"
    assert {path.stat().st_uid for path in run.rglob("*")} == {10001}


def runs_there(lab: Lab) -> list[list[str]]:
    """The runs of CPU ranks on each host."""
    hosts = json.loads(lab.ddpctl("hosts", "--json").stdout)
    return [[run["run"] for run in host["cpu_runs"]] for host in hosts]


def test_a_run_goes_on_and_is_stopped_and_is_listed(lab: Lab) -> None:
    canary = "canary-50ad11"
    text = (lab.folder / "ddpctl.yaml").read_text()
    (lab.folder / "secret.yaml").write_text(text.replace("device: cpu", "device: cpu, secrets: [TOKEN]"))
    done = lab.ddpctl("launch", "-f", "secret.yaml", "-d", "--name", "long", "--", "--epochs", "5000", TOKEN=canary)
    assert done.returncode == 0, done.stderr
    log = lab.docks[0].box.home / ".ddpctl/runs/long/node-0/node.log"
    wait_until(lambda: log.exists() and re.search(r"epoch +2/", log.read_text()), "the second epoch", timeout_s=120)
    inside = lab.ddpctl("exec", "long", "--node", "1", "--", "sh", "-c", "echo $PET_NODE_RANK; id -u; touch /x")
    assert inside.stdout == "1\n10001\n"
    assert inside.returncode != 0  # a read-only root
    assert "Read-only file system" in inside.stderr
    listed = subprocess.run(["ps", "axww"], env={"PATH": PATH}, capture_output=True, text=True, timeout=20).stdout
    assert (canary in listed, "ddptrain" in listed) == (False, True)
    roots = [lab.folder / "runs", lab.folder / "secret.yaml", *(dock.box.home for dock in lab.docks)]
    files = [path for root in roots for path in (root.rglob("*") if root.is_dir() else [root]) if path.is_file()]
    assert [path for path in files if canary.encode() in path.read_bytes()] == []

    assert runs_there(lab) == [["long"], ["long"]]
    stopped = lab.ddpctl("stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    assert "run 'long' stopped, exit code 143" in stopped.stderr
    wait_until(lambda: lab.containers() == "", "the end of the containers", timeout_s=60)
    assert runs_there(lab) == [[], []]
    assert list((lab.docks[0].box.home / ".ddpctl/runs/long/checkpoints").iterdir())


def is_paused(dock: Dock, container: str) -> bool:
    """Pause the container. On a busy machine, runc may be unable to freeze it at the first attempt."""
    docker(dock.env, "pause", container, check=False)
    return docker(dock.env, "inspect", "--format", "{{.State.Paused}}", container).stdout == "true\n"


def test_ctrl_c_twice_kills(lab: Lab) -> None:
    argv = lab.laptop.command(*CLI, "launch", "--name", "late", "--", "--epochs", "5000")
    launched = subprocess.Popen(argv, env=lab.variables, cwd=lab.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    log = lab.docks[0].box.home / ".ddpctl/runs/late/node-0/node.log"
    wait_until(lambda: log.exists() and re.search(r"epoch +1/", log.read_text()), "the first epoch", timeout_s=120)
    for dock in lab.docks:
        for container in docker(dock.env, "ps", "--quiet").stdout.split():  # nobody can save
            wait_until(
                lambda dock=dock, container=container: is_paused(dock, container), "a paused container", timeout_s=60
            )
    assert launched.stdout is not None
    launched.send_signal(signal.SIGINT)
    for line in launched.stdout:  # ddpctl says that it stops the run
        if "Ctrl-C" in line:
            break
    launched.send_signal(signal.SIGINT)
    output, _ = launched.communicate(timeout=90)
    assert launched.returncode == 130, output
    wait_until(lambda: lab.containers() == "", "the end of the containers", timeout_s=60)


def test_ctrl_c_is_a_keyboard_interrupt_in_containers(lab: Lab) -> None:
    """Ranks 1 and 2 do not catch it."""
    project = lab.folder / "project"
    project.mkdir()
    config = (lab.folder / "ddpctl.yaml").read_text().replace("kind: ssh,", "kind: ssh, project: sync,")
    (project / "ddpctl.yaml").write_text(config)
    shutil.copy(SCRIPTS / "interrupted.py", project / "script.py")
    argv = lab.laptop.command(*CLI, "launch", "--name", "interrupted", "--", "script.py")
    launched = subprocess.Popen(argv, env=lab.variables, cwd=project, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True)  # fmt: skip
    assert launched.stdout is not None
    lines: list[str] = []
    while sum(line.endswith("] ready\n") for line in lines) < 4:
        lines.append(launched.stdout.readline())
        assert lines[-1], "".join(lines)
    launched.send_signal(signal.SIGINT)
    output, _ = launched.communicate(timeout=120)
    assert launched.returncode == 130, output
    assert "run 'interrupted' stopped, exit code 130" in output
    wait_until(lambda: lab.containers() == "", "the end of the containers", timeout_s=60)
    for rank in range(4):
        run = lab.docks[rank // 2].box.home / ".ddpctl/runs/interrupted"
        log = (run / f"node-{rank // 2}/rank-{rank}.log").read_text()
        if rank in (0, 3):
            assert log == "ready\ninterrupted\nsaved\n"
        else:
            assert log.startswith("ready\nTraceback ")
            assert log.endswith("\nKeyboardInterrupt\n")


def refusal(lab: Lab) -> list[str]:
    done = lab.ddpctl("launch", "--name", "never", timeout=60)
    assert done.returncode in (69, 78), done.stderr
    assert not (lab.folder / "runs/never").exists()
    assert lab.containers() == ""
    return done.stderr.splitlines()


def test_another_image_on_one_host_is_refused(lab: Lab) -> None:
    second = lab.docks[1]
    wanted = docker(lab.docks[0].env, "image", "inspect", "--format", "{{.Id}}", IMAGE).stdout.strip()
    docker(second.env, "tag", IMAGE, "ddpctl-test:kept")
    source = lab.folder / "empty.tar"
    subprocess.run(["tar", "cf", source, "-T", "/dev/null"], check=True, env={"PATH": PATH})
    try:
        other = docker(second.env, "import", str(source), IMAGE).stdout.strip()
        (reason,) = refusal(lab)[4:]
        assert reason.startswith(f"{second.box.address}: {IMAGE} ")
        assert (other in reason, wanted in reason, lab.docks[0].box.address in reason) == (True, True, True)
    finally:
        docker(second.env, "tag", "ddpctl-test:kept", IMAGE)


def test_full_disk_of_a_host_is_refused(lab: Lab) -> None:
    second = lab.docks[1]
    home = second.box.home / ".ddpctl"
    home.mkdir(exist_ok=True)
    assert second.box.process
    inside = ["nsenter", f"--target={second.box.process.pid}", "--mount"]  # sshd's mounts are its own
    subprocess.run([*inside, "mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", home], check=True, env={"PATH": PATH})
    try:
        (reason,) = refusal(lab)[4:]
        assert reason.startswith(f"{second.box.address}: ")
        assert ("min_disk" in reason, "0.0 GiB" in reason, "~/.ddpctl" in reason) == (True, True, True)
    finally:
        subprocess.run([*inside, "umount", home], check=True, env={"PATH": PATH})


def test_stopped_docker_of_a_host_is_refused(lab: Lab) -> None:
    second = lab.docks[1]
    second.stop()
    try:
        done = lab.ddpctl("launch", "--name", "never")
        assert done.returncode == 69
        reason = done.stderr.splitlines()[4]
        assert reason.startswith(f"{second.box.address}: ")
        assert f"unix://{second.folder}/docker.sock" in reason
        assert not (lab.folder / "runs/never").exists()
    finally:
        second.start()
