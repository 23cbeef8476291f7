"""What the tests with real servers share, those of tests/cluster and of tests/nightly: which worker runs a test, one
Docker and one image a session, and trainings that are forks.
"""

import fcntl
import functools
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import exact
import lab
import pytest
from tests import forks
from tests.cluster import docker_lab
from xdist.scheduler import LoadScopeScheduling

PATH = os.environ["PATH"]
ROOT = Path(__file__).parents[2]
# Tests of these files share no server: each may run in any worker.
ALONE = ("test_exact.py", "test_faults.py", "test_monitoring.py", "test_prometheus.py", "test_replaced_nodes.py")
# What takes longest begins first.
FIRST = ("docker", "test_provision.py", "test_slurm.py", "test_ssh.py", "test_prometheus.py", "test_ssh_hosts.py",
         "test_srun.py", "test_replaced_nodes.py", "test_exact.py", "test_operator_environment.py", "test_doctor.py",
         "test_monitoring.py")  # fmt: skip


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that run in one worker, because they share a server: a file, or Docker's files."""
    file = nodeid.partition("::")[0]
    text = (ROOT / file).read_text()
    if "docker_env" in text or "packed_image" in text:
        return "docker"
    return nodeid if file.endswith(ALONE) else file


def order_of(nodeid: str) -> int:
    return next((number for number, part in enumerate(FIRST) if part in scope_of(nodeid)), len(FIRST))


class ByServer(LoadScopeScheduling):
    """With several workers."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: order_of(item.nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByServer:
    """See pytest-xdist. (Its own groups, --dist loadgroup of 3.8, are not seen by pytest 9.2.)"""
    config.option.loadscopereorder = False  # else: by the number of tests
    return ByServer(config, log)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """``once(name, make)``: the text that ``make()`` returns, made by the first worker that asks for the name."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def once(name: str, make: Callable[[], str]) -> str:
        path = folder / f"once-{name}"
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (text := file.read()):
                text = make()
                file.write(text)
        return text

    return once


@pytest.fixture(scope="session", autouse=True)
def forked(once: Callable[[str, Callable[[], str]], str]) -> Iterator[None]:
    """What the benchmarks start, here or on a machine of bench/lab.py, are forks (tests/forks.py).

    The weights of an undisturbed training are those of the first worker that asked for them.
    """

    def run_python(arguments: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        return forks.run(arguments, executed=arguments[1] != "ddprun", **options)

    train = exact.undisturbed.__wrapped__

    @functools.cache
    def undisturbed(ranks: tuple[int, int], options: tuple[str, ...]) -> str:
        return once(f"weights-{hash_of(ranks, options)}", lambda: train(ranks, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab.Machine, "start", forks.start_on)
        patch.setattr(exact, "run_python", run_python)
        patch.setattr(exact, "undisturbed", undisturbed)
        yield


def hash_of(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch, clean_environment: None) -> None:
    """The machine's own programs: ip, mount, sshd."""
    monkeypatch.setenv("PATH", PATH)


@pytest.fixture(scope="session")
def docker_env() -> Iterator[dict[str, str]]:
    """The environment of a docker client whose engine answers; skipped by name where there can be none."""
    if reason := docker_lab.missing():
        pytest.skip(reason)
    with docker_lab.engine() as env:
        yield env


@pytest.fixture(scope="session")
def image(docker_env: dict[str, str]) -> str:
    """The project's image, built from docker/Dockerfile."""
    return docker_lab.build(docker_env)


@pytest.fixture(scope="session")
def packed_image(docker_env: dict[str, str], image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image as a file, for other engines."""
    path = tmp_path_factory.mktemp("packed") / "image.tar"
    docker_lab.docker(docker_env, "save", "--output", str(path), image, timeout_s=300)
    return path
