"""Environments from a lock on two real sshds, with the real uv and torch from PyPI.

uv's cache in the user's home folder keeps the packages between two nights: the environments are hard links to it.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests.cluster.ssh_lab import MISSING, PACKAGES, Box, Person, box
from tests.messages import assert_names

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or ""), pytest.mark.timeout(1800)]
LOCK = "torch==2.10.0\nnumpy==2.2.6\nhumanize=={}\n"
SCRIPT = """\
import humanize
import torch
from torch import distributed

distributed.init_process_group("gloo")
distributed.barrier()
if distributed.get_rank() == 0:
    print("versions", humanize.__version__, torch.__version__)
distributed.destroy_process_group()
"""
CONFIG = """\
job: {{name: digits, nodes: 2, gpus: 1, device: cpu}}
target: boxes
targets:
  boxes: {{kind: ssh, runtime: none, environment: requirements.txt, project: sync, hosts: [{}]}}
"""
Ddpctl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Box, ...]]:
    port, person = free_port(), Person(tmp_path / "me")
    variables = {"PYTHONPATH": "", "UV_CACHE_DIR": str(Path.home() / ".cache/uv")}
    with (
        box(tmp_path / "box1", person, address="127.0.0.2", port=port, environ=variables) as first,
        box(tmp_path / "box2", person, address="127.0.0.3", port=port, environ=variables) as two,
    ):
        yield first, two


@pytest.fixture
def ddpctl(tmp_path: Path, boxes: tuple[Box, ...]) -> Ddpctl:
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text(SCRIPT)
    hosts = ", ".join(f'"{each.address}:{each.port}"' for each in boxes)
    (project / "ddpctl.yaml").write_text(CONFIG.format(hosts))

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        env = {"HOME": str(tmp_path / "me"), "PATH": "/usr/bin:/bin", "PYTHONPATH": PACKAGES}
        env["DDPCTL_STATE_DIR"] = str(tmp_path / "runs")
        argv = [sys.executable, "-P", "-m", "ddpctl", *arguments]
        return subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=900, check=False)

    return call


def change(environment: Path) -> None:
    """Give an environment another version of a package, as another type of machine may have."""
    (package,) = environment.glob("lib/*/site-packages/humanize-4.9.0.dist-info")
    package.rename(package.with_name("humanize-4.9.1.dist-info"))
    record = environment / "ddpctl-environment.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"packages": "16 (changed)"}))


def test_each_lock_has_its_environment_on_every_host(tmp_path: Path, boxes: tuple[Box, ...], ddpctl: Ddpctl) -> None:
    (tmp_path / "project/requirements.txt").write_text(LOCK.format("4.9.0"))
    done = ddpctl("launch", "--name", "night", "--", "train.py")
    assert done.returncode == 0, done.stderr
    assert_names(done.stdout, "versions", "4.9.0")
    folders = [each.home / ".ddpctl/environments" for each in boxes]
    first = [{path.parent for path in folder.glob("*/*/ddpctl-environment.json")} for folder in folders]
    assert [*map(len, first)] == [1, 1]
    record = json.loads((tmp_path / "runs/night/run.json").read_text())["handle"]["environment"]
    for each in boxes:
        facts = json.loads(next((each.home / ".ddpctl/runs/night").glob("node-*/environment.json")).read_text())
        assert_names(facts["environment"], record["lock"], record["packages"])
    ((environment,), _) = first
    before = (environment / "ddpctl-environment.json").stat().st_mtime_ns
    (tmp_path / "project/requirements.txt").write_text(LOCK.format("4.10.0"))
    assert_names(ddpctl("launch", "--name", "day", "--", "train.py").stdout, "versions", "4.10.0")
    (tmp_path / "project/requirements.txt").write_text(LOCK.format("4.9.0"))
    assert_names(ddpctl("launch", "--name", "noon", "--", "train.py").stdout, "versions", "4.9.0")
    assert len([*folders[0].glob("*/*/ddpctl-environment.json")]) == 2
    assert (environment / "ddpctl-environment.json").stat().st_mtime_ns == before
    change(boxes[1].home / environment.relative_to(boxes[0].home))
    assert ddpctl("launch", "--name", "late", "--", "train.py").returncode == 78
    assert_names(ddpctl("explain", "late").stdout, "humanize", "4.9.0 on node 0", "4.9.1 on node 1")
    assert ddpctl("rm", "night", "day", "noon", "late").returncode == 0
    assert environment.exists()  # among the newest
