"""What engines say of images, and the command lines that ask, build and push."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.in_process import ddpctl

from ddpctl.commands.image import parse_host
from ddpctl.errors import UsageError
from ddpctl.files.images import Image, difference, read_inspect

SAID = {
    "Id": "sha256:" + "a" * 64,
    "RepoTags": ["me/train:1"],
    "RepoDigests": ["me/train@sha256:" + "d" * 64],
    "Created": "2026-11-20T12:00:00Z",
    "Architecture": "amd64",
    "Os": "linux",
    "Size": 1_234_000_000,
    "Config": {"User": "10001:0", "Entrypoint": ["/usr/bin/tini", "--", "ddprun"], "Labels": {"a": "b"}},
    "RootFS": {"Type": "layers", "Layers": ["sha256:" + "1" * 64, "sha256:" + "2" * 64]},
}


def image(**changes: object) -> Image:
    return read_inspect("me/train:1", json.dumps([{**SAID, **changes}]))


def test_the_output_of_docker_and_of_podman_is_the_same_image() -> None:
    bare = {**SAID, "Id": "a" * 64}  # podman leaves the algorithm out
    assert read_inspect("me/train:1", json.dumps([bare])) == image()


def test_an_image_is_the_same_by_its_id_or_by_a_digest() -> None:
    assert difference(image(), image(RepoDigests=None)) == ""
    assert difference(image(), image(Id="sha256:" + "b" * 64)) == ""  # another engine's idea of an ID
    other = image(Id="sha256:" + "b" * 64, RepoDigests=["me/train@sha256:" + "e" * 64])
    facts = ("me/train:1", f"sha256:{'e' * 64}", f"sha256:{'d' * 64}")
    assert all(fact in difference(image(), other) for fact in facts)
    by_id = difference(image(RepoDigests=[]), image(Id="sha256:" + "b" * 64, RepoDigests=[]))
    assert all(fact in by_id for fact in ("me/train:1", f"sha256:{'b' * 64}", f"sha256:{'a' * 64}"))


@pytest.mark.parametrize("text", ["", "@box1", "box1:ssh", "-oProxyCommand=x", "alice@"])
def test_a_text_that_is_no_host_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=f"^'{text}' "):
        parse_host(text)


def test_an_option_is_no_host() -> None:
    argv = [sys.executable, "-P", "-m", "ddpctl", "image", "ship", "-oProxyCommand=x"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("ddpctl: ")


def test_a_dry_run_builds_nothing(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("")
    (tmp_path / "ddpctl.yaml").write_text("job:\n  image: me/train:1\n")
    done = ddpctl("image", "build", "--dry-run", "--build-arg", "A=b c", cwd=tmp_path)
    assert done.stdout == "DOCKER_BUILDKIT=1 docker build --file Dockerfile --tag me/train:1 --build-arg 'A=b c' .\n"
    done = ddpctl("image", "push", "--dry-run", "--engine", "podman", cwd=tmp_path)
    assert done.stdout == "podman push me/train:1\n"
