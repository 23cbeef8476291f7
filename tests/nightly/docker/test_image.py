"""The image, in a real Docker: who it runs as, what it may write, how signals and exit codes pass, what is in it."""

import os
import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster import docker_lab
from tests.cluster.test_docker import Lab
from tests.cluster.test_docker import lab as lab
from tests.e2e.driver import ROOT, wait_until

pytestmark = pytest.mark.timeout(1800)  # the image may have to be built
# As restricted as a cluster may have it.
LOCKED = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=1g")
UID = 12345  # nobody that the image knows
CANARY = "canary-5d1f0c9a"

Docker = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def docker(docker_env: dict[str, str]) -> Docker:
    """Run a docker command."""
    return lambda *args, **options: docker_lab.docker(docker_env, *args, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A caller's folder."""
    made = tmp_path / "project"
    made.mkdir()
    os.chown(made, UID, UID)
    return made


@pytest.fixture
def training(docker: Docker, image: str) -> Iterator[str]:
    """A container that trains for long."""
    name = f"ddpctl-test-{uuid.uuid4().hex[:8]}"
    line = (*LOCKED, "--env=DDP_RUN_DIR=/runs/x", "--env=DDP_CHECKPOINT_DIR=/runs/x/checkpoints", "--volume=/runs")
    program = ("--nproc-per-node=2", "-m", "ddptrain", "--epochs=100000")
    docker("run", "--detach", "--name", name, "--network=none", *line, image, *program)
    try:
        wait_until(lambda: re.search(r"epoch\s+2/", docker("logs", name).stdout), "the second epoch")
        yield name
    finally:
        docker("rm", "--force", "--volumes", name)


def test_it_trains_for_a_caller_on_a_read_only_root(docker: Docker, image: str, folder: Path) -> None:
    own = (f"--user={UID}:{UID}", f"--volume={folder}:/workspace")
    done = docker("run", "--rm", "--network=none", *LOCKED, *own, image, "--nproc-per-node=2", "-m", "ddptrain")
    assert "test accuracy" in done.stdout, done.stdout
    assert float(re.findall(r"test accuracy\s+([\d.]+) %", done.stdout)[0]) >= 98
    made = list(folder.rglob("*"))
    assert any(path.suffix == ".pt" for path in made)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in made} == {(UID, UID)}
    assert "__pycache__" not in {path.name for path in made}


def test_a_folder_of_the_group_of_a_cluster_is_enough(docker: Docker, image: str, folder: Path) -> None:
    """Kubernetes' fsGroup: the image's own user, and a group more."""
    os.chown(folder, 0, UID)
    folder.chmod(0o2775)
    write = "import getpass, pathlib; pathlib.Path('x').write_text(getpass.getuser()); print(pathlib.Path.home())"
    line = (*LOCKED, f"--group-add={UID}", f"--volume={folder}:/workspace", "--entrypoint=python")
    done = docker("run", "--rm", "--network=none", *line, image, "-c", write)
    assert (done.stdout, (folder / "x").read_text(), (folder / "x").stat().st_uid) == ("/tmp\n", "ddp", 10001)


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("USR1", 138)])
def test_tini_passes_a_signal_to_ddprun_and_the_run_is_saved(
    docker: Docker, training: str, name: str, code: int
) -> None:
    assert docker("exec", training, "cat", "/proc/1/comm").stdout == "tini\n"
    assert docker("exec", training, "id", "--user").stdout == "10001\n"  # not root
    probe = docker("exec", training, "python", "-m", "ddprun.healthcheck")
    assert (probe.returncode, probe.stdout) == (0, "1 ddprun well\n")

    docker("kill", "--signal", name, training)
    assert docker("wait", training).stdout == f"{code}\n"
    word = docker("cp", f"{training}:/runs/x/node-0/outcome.json", "-", check=False)
    assert word.returncode == 0, word.stderr
    assert f'"code": {code}' in word.stdout


def test_without_a_ddprun_the_health_check_fails(docker: Docker, image: str) -> None:
    line = ("run", "--rm", "--network=none", "--entrypoint=python", image, "-m", "ddprun.healthcheck")
    done = docker(*line, check=False)
    assert (done.returncode, done.stdout) == (1, "no ddprun runs here\n")


def test_a_scripts_exit_code_is_the_containers(docker: Docker, image: str, folder: Path) -> None:
    (folder / "ends.py").write_text("raise SystemExit(3)")
    line = ("run", "--rm", "--network=none", *LOCKED, f"--volume={folder}:/workspace:ro", image, "ends.py")
    assert docker(*line, check=False).returncode == 3


def test_own_image_of_three_lines_trains(docker: Docker, image: str) -> None:
    own = ROOT / "examples" / "own_image"
    lines = [line for line in (own / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines] == ["ARG", "FROM", "COPY"]
    docker("build", "--quiet", f"--build-arg=BASE={image}", "--tag=ddpctl-test:own", str(own))
    done = docker("run", "--rm", "--network=none", *LOCKED, "ddpctl-test:own", "--nproc-per-node=2", "train.py")
    assert sorted(re.findall(r"rank \d of 2: .*", done.stdout)) == [
        "rank 0 of 2: the ranks' sum is 1",
        "rank 1 of 2: the ranks' sum is 1",
    ]


def test_a_runs_secret_is_not_in_the_image(docker_env: dict[str, str], docker: Docker, image: str) -> None:
    line = ("run", "--rm", "--network=none", f"--env=TOKEN={CANARY}", "--entrypoint=python", image)
    read = "import os; print(len(os.environ['TOKEN']))"
    assert docker(*line, "-c", read).stdout == f"{len(CANARY)}\n"
    scan = f"set -o pipefail; docker save {image} | grep --count --text {CANARY}"
    scanned = subprocess.run(["bash", "-c", scan], env=docker_env, capture_output=True, text=True, timeout=120)
    assert (scanned.stdout, scanned.stderr) == ("0\n", "")


def test_image_that_a_host_lacks_starts_nothing(lab: Lab) -> None:
    (lab.folder / "ddpctl.yaml").write_text((lab.folder / "ddpctl.yaml").read_text().replace(":image'", ":absent'"))
    refused = lab.ddpctl("launch", "--name", "never", code=78)
    assert "127.0.0.1: " in refused.stderr
    assert "ddpctl-test:absent" in refused.stderr
    assert not (lab.folder / "runs/never").exists()
    assert lab.containers() == []
