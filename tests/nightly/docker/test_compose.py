"""docker/compose.yaml, as it stands: two node containers on a network of their own train digits."""

import re
import subprocess
from collections.abc import Iterator

import pytest
from tests.cluster import docker_lab
from tests.e2e.driver import ROOT

FILE = str(ROOT / "docker" / "compose.yaml")
PROJECT = "ddpctl-test-compose"


@pytest.fixture
def compose(docker_env: dict[str, str], image: str) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """The command line, and its environment; skipped by name where there is no compose."""
    env = docker_env | {"IMAGE": image}
    for program in ((str(docker_lab.DOCKER), "compose"), ("docker-compose",)):
        try:
            found = subprocess.run([*program, "version"], env=env, capture_output=True, timeout=30).returncode == 0
        except FileNotFoundError:
            continue
        if found:
            command = (*program, "--file", FILE, "--project-name", PROJECT)
            yield command, env
            subprocess.run([*command, "down", "--volumes"], env=env, check=True, capture_output=True, timeout=90)
            return
    pytest.skip("needs docker compose (apt install docker-compose)")


def test_two_node_containers_train(compose: tuple[tuple[str, ...], dict[str, str]]) -> None:
    command, env = compose
    up = [*command, "up", "--no-build", "--abort-on-container-exit", "--exit-code-from", "node1"]
    done = subprocess.run(up, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "ranks 0 to 1 of 4 started" in done.stdout
    assert "ranks 2 to 3 of 4 started" in done.stdout
    assert float(re.findall(r"test accuracy\s+([\d.]+) %", done.stdout)[0]) >= 98
