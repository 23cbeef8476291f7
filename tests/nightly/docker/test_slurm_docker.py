"""Containers under a real srun: a node with a Docker of its own, in the node's own network."""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster import docker_lab, slurm_lab
from tests.cluster.slurm_site import Site, until

pytestmark = [
    pytest.mark.skipif(bool(slurm_lab.missing()), reason=slurm_lab.missing() or "-"),
    pytest.mark.timeout(1800),
]
FILE = """\
job: {name: digits, nodes: 1, gpus: 2, device: cpu, shm: 64Mi, image: %s}
targets: {hpc: {kind: slurm, runtime: docker}}
target: hpc
"""


@dataclass(frozen=True, kw_only=True)
class Docked(Site):
    """A site on whose one node a Docker runs."""

    docker: dict[str, str]  # the environment of its clients

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "DOCKER_HOST": self.docker["DOCKER_HOST"]}

    def containers(self) -> list[str]:
        return docker_lab.docker(self.docker, "ps", "--all", "--format", "{{.Names}}").stdout.split()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, packed_image: Path, image: str) -> Iterator[Docked]:
    folder = tmp_path_factory.mktemp("site")
    with (
        slurm_lab.cluster(1, gpus=0, prefix="dockslurm") as slurm,
        tempfile.TemporaryDirectory(prefix="dock-") as own,
        docker_lab.dockerd(
            Path(own), "--bridge=none", "--iptables=false", "--ip6tables=false", netns=slurm.nodes[0].namespace
        ) as env,
    ):
        docker_lab.docker(env, "load", "--input", str(packed_image), timeout_s=300)
        (folder / "ddpctl.yaml").write_text(FILE % image)
        folder.chmod(0o777)
        yield Docked(slurm=slurm, folder=folder, docker=env)


def test_a_training_in_containers(site: Docked) -> None:
    """>= 98 % on real digits; its files are the submitter's; no container is left."""
    said = site.ddpctl("launch", "--name", "night", "--", "ddptrain", "--epochs", "10")
    assert re.search(r"world size +2\n", said), said
    assert (accuracy := re.search(r"test accuracy +([0-9.]+) %", said)), said
    assert float(accuracy[1]) >= 98
    assert site.containers() == []


def test_scancel_saves_and_leaves_no_container(site: Docked) -> None:
    site.ddpctl("launch", "--name", "long", "--detach", "--", "ddptrain", "--epochs", "5000")
    until(lambda: "epoch  2/" in site.log("long"), 120, lambda: site.log("long"))
    (name,) = site.containers()
    assert name.startswith("ddpctl-")
    job = site.job("long")
    site.sh("scancel", job)
    until(lambda: site.state(job) in ("CANCELLED", "FAILED"), 60, lambda: site.state(job) + site.log("long"))
    until(lambda: site.containers() == [], 20, lambda: str(site.containers()))
    outcome = json.loads((site.folder / "state" / "long" / "node-0" / "outcome.json").read_text())
    assert (outcome["code"], outcome["cause"]) == (143, "stopped")
    assert site.checkpoints("long")[-1] == outcome["step"]
