"""What the tests against real servers share: one Docker and one image a session, made when the first test asks."""

import os
from collections.abc import Iterator

import pytest
from tests.cluster import docker_lab

PATH = os.environ["PATH"]


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
