"""The image, built as checked out, in a real Docker: what is in it, and a run in its containers over a real SSH."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests.cluster import docker_lab
from tests.cluster.ssh_lab import MISSING, PACKAGES, PATH, Box, Person, box
from tests.e2e.driver import wait_until

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or ""), pytest.mark.timeout(1800)]
# As restricted as a cluster may have it.
LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=1g")
UID = 12345  # nobody that the image knows
CANARY = "canary-5d1f0c9a"

Docker = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def docker(docker_env: dict[str, str]) -> Docker:
    """Run a docker command."""
    return lambda *args, **options: docker_lab.docker(docker_env, *args, **options)


def test_image_has_its_user_entrypoint_health_check_labels_and_size(docker: Docker, image: str) -> None:
    (inspected,) = json.loads(docker("image", "inspect", image).stdout)
    config = inspected["Config"]
    assert (config["User"], config["Entrypoint"], config["Cmd"]) == (
        "10001:0",
        ["/usr/bin/tini", "--", "ddprun"],
        ["--help"],
    )
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "ddprun.healthcheck"]
    titles = {key.removeprefix("org.opencontainers.image.") for key in config["Labels"]}
    assert titles >= {"title", "description", "version", "revision", "licenses", "source"}
    assert inspected["Size"] < 1_600_000_000  # of which torch's CPU build is 1.0 GB
    layers = docker("history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image)
    (project,) = [line for line in layers.stdout.splitlines() if "/dist/*.whl" in line]
    assert int(project.split()[0]) < 6_400_000  # what an update of the project sends


def test_sigterm_saves_a_callers_training_on_a_read_only_root(docker: Docker, image: str, tmp_path: Path) -> None:
    """A user that the image does not know, without capabilities; tini passes the signal on."""
    name = f"ddpctl-test-{os.getpid()}"
    folder = tmp_path / "project"
    folder.mkdir()
    os.chown(folder, UID, UID)
    place = ("--env=DDP_RUN_DIR=/workspace/x", "--env=DDP_CHECKPOINT_DIR=/workspace/x/checkpoints")
    user = (f"--user={UID}:{UID}", f"--volume={folder}:/workspace", "--network=none")
    program = ("--nproc-per-node=2", "-m", "ddptrain", "--epochs=100000")
    docker("run", "--detach", "--name", name, *LOCKED, *place, *user, image, *program)
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", docker("logs", name).stdout), "the second epoch", timeout_s=120)
        assert docker("exec", name, "cat", "/proc/1/comm").stdout == "tini\n"
        assert docker("exec", name, "python", "-m", "ddprun.healthcheck").returncode == 0
        docker("kill", "--signal", "TERM", name)
        assert docker("wait", name).stdout == "143\n"
    finally:
        docker("rm", "--force", "--volumes", name)
    outcome = json.loads((folder / "x/node-0/outcome.json").read_text())
    assert (outcome["code"], outcome["cause"]) == (143, "stopped")
    files = list(folder.rglob("*"))
    assert any(path.name == f"step-{outcome['step']:08}.pt" for path in files)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files} == {(UID, UID)}
    healthcheck = ("run", "--rm", "--network=none", "--entrypoint=python", image, "-m", "ddprun.healthcheck")
    assert docker(*healthcheck, check=False).returncode == 1  # no ddprun runs there


@dataclass(frozen=True, kw_only=True)
class Lab:
    """A laptop, and a machine with an sshd and the Docker that has the image."""

    folder: Path
    box: Box
    docker: dict[str, str]
    environ: dict[str, str]

    def ddpctl(self, *args: str, code: int = 0, **variables: str) -> "subprocess.CompletedProcess[str]":
        argv = (sys.executable, "-P", "-m", "ddpctl", *args)
        environ = {**self.environ, **variables}
        done = subprocess.run(argv, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def containers(self) -> list[str]:
        return docker_lab.docker(self.docker, "ps", "--all", "--format", "{{.Names}}").stdout.split()


@pytest.fixture
def lab(tmp_path: Path, docker_env: dict[str, str], image: str) -> Iterator[Lab]:
    person, port = Person(tmp_path / "me"), free_port()
    engine = {name: docker_env[name] for name in ("DOCKER_HOST",) if name in docker_env}
    with box(tmp_path / "box", person, address="127.0.0.1", port=port, environ=engine) as machine:
        (tmp_path / "ddpctl.yaml").write_text(
            f"job: {{name: digits, gpus: 2, device: cpu, shm: 64Mi, image: '{image}', secrets: [TOKEN]}}\n"
            f"target: boxes\ntargets: {{boxes: {{kind: ssh, hosts: ['127.0.0.1:{port}']}}}}\n"
        )
        environ = {"HOME": str(person.home), "PATH": PATH, "PYTHONPATH": PACKAGES, "TOKEN": CANARY}
        environ["DDPCTL_STATE_DIR"] = str(tmp_path / "runs")
        yield Lab(folder=tmp_path, box=machine, docker=docker_env, environ=environ)


def test_run_in_containers_over_ssh_trains_and_is_stopped_without_a_trace(lab: Lab) -> None:
    trained = lab.ddpctl("launch", "--name", "night", "--", "-m", "ddptrain", "--epochs", "10").stdout
    assert re.search(r"world size +2\n", trained), trained
    accuracy = re.search(r"test accuracy +([\d.]+) %", trained)
    assert accuracy, trained
    assert float(accuracy[1]) >= 98
    wait_until(lambda: lab.containers() == [], "the end of the container", timeout_s=60)
    run = lab.box.home / ".ddpctl/runs/night"
    assert {path.stat().st_uid for path in run.rglob("*")} == {10001}

    lab.ddpctl("launch", "--detach", "--name", "long", "--", "--epochs", "5000")
    run = lab.box.home / ".ddpctl/runs/long"
    log = run / "node-0/node.log"
    wait_until(lambda: log.exists() and re.search(r"epoch +2/", log.read_text()), "the second epoch", timeout_s=120)
    assert [name.startswith("ddpctl-") for name in lab.containers()] == [True]
    inside = lab.ddpctl("exec", "long", "--", "sh", "-c", "echo $PET_NODE_RANK; id -u; touch /x || exit 9", code=9)
    assert (inside.stdout, "Read-only file system" in inside.stderr) == ("0\n10001\n", True)
    processes = subprocess.run(["ps", "axww"], capture_output=True, text=True, timeout=20, check=True).stdout
    assert (CANARY in processes, "ddptrain" in processes) == (False, True)
    folders = (lab.folder / "runs", lab.box.home)
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []

    lab.ddpctl("stop", "long")
    status = json.loads(lab.ddpctl("status", "long", "--json").stdout)
    assert (status["state"], status["code"]) == ("stopped", 143)
    wait_until(lambda: lab.containers() == [], "the end of the container", timeout_s=60)
    assert (run / f"checkpoints/step-{status['outcome']['step']:08}.pt").exists()
