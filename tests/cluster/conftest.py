"""What the tests against real servers share: one Docker and one image a session, made when the first test asks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster import docker_lab
from xdist.scheduler import LoadScopeScheduling

PATH = os.environ["PATH"]


class ByServer(LoadScopeScheduling):
    """With several workers (make cluster): who shares a server has one; a Docker is shared by all who want one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if "docker_env" in (Path(__file__).parents[2] / file).read_text():
            return "docker"
        return nodeid if file.endswith("test_faults.py") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    """See pytest-xdist. (Its own groups, --dist loadgroup of 3.8, are not seen by pytest 9.2.)"""
    return ByServer(config, log)


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    """The machine's own programs: ip, mount, sshd."""
    monkeypatch.setenv("PATH", PATH)


@pytest.fixture(scope="session")
def docker_env() -> Iterator[dict[str, str]]:
    """The environment of a docker client whose engine answers; skipped by name where there can be none."""
    if why := docker_lab.missing():
        pytest.skip(why)
    with docker_lab.engine() as env:
        yield env


@pytest.fixture(scope="session")
def image(docker_env: dict[str, str]) -> str:
    """The project's image, built from docker/Dockerfile."""
    return docker_lab.build(docker_env)
