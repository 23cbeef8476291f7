"""``ddpctl image ship`` to two machines with an sshd and a Docker of their own each."""

import getpass
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bench.measuring import free_port
from tests.cluster import docker_lab, ssh_lab
from tests.e2e.driver import DDPCTL

pytestmark = [
    pytest.mark.skipif(bool(ssh_lab.MISSING) or os.geteuid() != 0, reason="needs root, sshd and ssh-keygen"),
    pytest.mark.timeout(1800),  # the base of the image may have to be made
]
IMAGE = "ddpctl-test:ship"
BLOB = 30_000_000  # bytes that do not compress: the layer that stays


@dataclass(frozen=True, kw_only=True)
class There:
    """A machine to ship to."""

    name: str  # as ddpctl is told
    cache: Path
    env: dict[str, str]  # of a client of its Docker

    def image_id(self) -> str:
        return docker_lab.docker(self.env, "image", "inspect", "--format={{.Id}}", IMAGE).stdout.strip()

    def forget(self) -> None:
        docker_lab.docker(self.env, "image", "rm", "--force", IMAGE)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "person"


@pytest.fixture
def hosts(tmp_path: Path, home: Path, docker_env: dict[str, str]) -> Iterator[list[There]]:
    person = ssh_lab.Person(home)
    with ExitStack() as stack:
        made = []
        for number in (1, 2):
            folder = tmp_path / f"box{number}"
            port = free_port()
            box = stack.enter_context(ssh_lab.box(folder, person, address=f"127.0.1.{number}", port=port))
            own = Path(stack.enter_context(TemporaryDirectory(prefix="ddpctl-test-docker-")))
            lone = ("--bridge=none", "--iptables=false")
            env = stack.enter_context(docker_lab.dockerd(own, *lone))
            environ = {**env, "HOME": str(box.home)}  # its own Docker is what docker means there
            docker_lab.docker(environ, "context", "create", "own", f"--docker=host={env['DOCKER_HOST']}")
            docker_lab.docker({k: v for k, v in environ.items() if k != "DOCKER_HOST"}, "context", "use", "own")
            cache = box.home / ".cache" / "ddpctl" / "images"
            made.append(There(name=f"{getpass.getuser()}@{box.address}:{port}", cache=cache, env=env))
        yield made


def build(env: dict[str, str], folder: Path, text: str) -> str:
    """The image whose last layer has this text; its ID."""
    folder.mkdir(exist_ok=True)
    blob = folder / "blob"
    if not blob.exists():
        blob.write_bytes(os.urandom(BLOB))
    (folder / "words").write_text(text)
    (folder / "Dockerfile").write_text(f"FROM {docker_lab.base(env)}\nCOPY blob /\nCOPY words /\n")
    docker_lab.docker(env, "build", "--quiet", "--tag", IMAGE, str(folder))
    return docker_lab.docker(env, "image", "inspect", "--format={{.Id}}", IMAGE).stdout.strip()


def test_a_ship_a_smaller_one_and_one_that_was_cut_off(
    hosts: list[There], home: Path, tmp_path: Path, docker_env: dict[str, str]
) -> None:
    def ship(*names: str, code: int = 0) -> tuple[list[int], str]:
        """The bytes that each host was sent, and what was said."""
        env = os.environ | docker_env | {"HOME": str(home), "PATH": docker_lab.PATH}
        line = [*DDPCTL, "image", "ship", "--json", "--image", IMAGE, *names]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        return [host["sent"] for host in json.loads(done.stdout)], done.stderr

    names = [host.name for host in hosts]
    first_id = build(docker_env, tmp_path / "context", "first")
    first, output = ship(*names)
    assert [host.image_id() for host in hosts] == [first_id] * 2, output
    assert first[0] == first[1] > BLOB

    second_id = build(docker_env, tmp_path / "context", "second")
    assert second_id != first_id
    second, output = ship(*names)
    assert [host.image_id() for host in hosts] == [second_id] * 2, output
    assert max(second) <= 0.05 * first[0]

    assert ship(*names)[0] == [0, 0]

    # The first was cut off in the middle of its largest layer, the second got a byte that is wrong.
    for host in hosts:
        largest = max(host.cache.iterdir(), key=lambda path: path.stat().st_size)
        content = largest.read_bytes()
        largest.unlink()
        flipped = bytes([content[1000] ^ 0xFF])
        broken = content[: len(content) // 2] if host is hosts[0] else content[:1000] + flipped + content[1001:]
        largest.with_name(f"{largest.name}.part").write_bytes(broken)
        host.forget()
    third, output = ship(*names, code=69)
    assert (third[0], hosts[0].image_id()) == (len(content) - len(content) // 2, second_id)
    address = names[1].partition("@")[2].partition(":")[0]
    assert f"{address}: layer {largest.name[:12]} " in output
    assert output.splitlines()[-1].endswith(f"1 of 2 hosts: {address}")

    fourth, output = ship(names[1], f"127.0.1.3:{free_port()}", code=69)
    assert (fourth[0] >= len(content), hosts[1].image_id()) == (True, second_id), output
    assert "127.0.1.3" in output.splitlines()[-1]
