"""What engines say of images, and the command lines that ask, build and push."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.in_process import ddpctl

from ddpctl.command import Host, Output
from ddpctl.commands.image import parse_host
from ddpctl.errors import UnavailableError, UsageError
from ddpctl.image_transfer import inspect_image
from ddpctl.images import Engine, Image, build_line, difference, human_size, pin, read_inspect, show

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


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[{}]", "[1]", '[{"Id": 1}]'],
    ids=["nothing", "no image", "no list", "an empty image", "a number", "an id alone"],
)  # fmt: skip
def test_an_answer_without_an_image_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="image inspect"):
        read_inspect("x", text)


def test_an_image_is_the_same_by_its_id_or_by_a_digest() -> None:
    assert difference(image(), image(RepoDigests=None)) == ""
    assert difference(image(), image(Id="sha256:" + "b" * 64)) == ""  # another engine's idea of an ID
    other = image(Id="sha256:" + "b" * 64, RepoDigests=["me/train@sha256:" + "e" * 64])
    facts = ("me/train:1", f"sha256:{'e' * 64}", f"sha256:{'d' * 64}")
    assert all(fact in difference(image(), other) for fact in facts)
    by_id = difference(image(RepoDigests=[]), image(Id="sha256:" + "b" * 64, RepoDigests=[]))
    assert all(fact in by_id for fact in ("me/train:1", f"sha256:{'b' * 64}", f"sha256:{'a' * 64}"))


def test_a_pin_is_the_registrys_digest_or_the_id() -> None:
    assert pin(image()) == "sha256:" + "d" * 64
    assert pin(image(RepoDigests=[])) == "sha256:" + "a" * 64


def test_the_command_that_builds_an_image() -> None:
    args = ("TORCH=2.11.0", "BASE=python:3.12-slim")
    line = build_line("docker", tag="me/train:1", dockerfile="docker/Dockerfile", context=".", build_args=args)
    assert " ".join(line) == (
        "docker build --file docker/Dockerfile --tag me/train:1 "
        "--build-arg TORCH=2.11.0 --build-arg BASE=python:3.12-slim ."
    )


def test_the_table_of_an_image() -> None:
    assert show(image(), "python 3.11.7\ntorch 2.13.0\n") == [
        "me/train:1  1.2 GB in 2 layers, linux/amd64",
        f"  id           sha256:{'a' * 64}",
        f"  digest       me/train@sha256:{'d' * 64}",
        "  created      2026-11-20T12:00:00Z",
        "  user         10001:0",
        "  entry point  /usr/bin/tini -- ddprun",
        "  inside       python 3.11.7, torch 2.13.0",
    ]


@pytest.mark.parametrize(("size", "text"), [(999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (10**9, "1.0 GB")])
def test_a_size_has_a_decimal_unit(size: int, text: str) -> None:
    assert human_size(size) == text


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("box1", Host(address="box1")),
        ("alice@box1:2222", Host(address="box1", user="alice", port=2222)),
        ("[fe80::1]:22", Host(address="fe80::1", port=22)),
    ],
)
def test_a_host_is_user_address_and_port(text: str, host: Host) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "@box1", "box1:ssh", "-oProxyCommand=x", "alice@"])
def test_a_text_that_is_no_host_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=f"^'{text}' "):
        parse_host(text)


@pytest.mark.parametrize(
    ("line", "code", "fact"),
    [
        ("image build", 66, "no Dockerfile or docker/Dockerfile"),
        ("image build -f x", 66, "no x"),
        ("image build UPPER", 2, "--image: 'UPPER'"),
        ("image inspect x", 69, "docker: not found"),
        ("image ship", 2, "--target"),
        ("image ship --image x a/b", 2, "'a/b'"),
    ],
)
def test_an_error_is_one_line_with_its_code(line: str, code: int, fact: str, tmp_path: Path) -> None:
    done = ddpctl(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("ddpctl: ")
    assert done.stderr.count("\n") == 1
    assert fact in done.stderr


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


@pytest.mark.parametrize(
    ("engine", "stderr", "is_missing"),
    [
        ("docker", "Error response from daemon: No such image: x:latest", True),
        ("podman", "Error: x: image not known", True),
        ("docker", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", False),
    ],
    ids=["docker", "podman", "no daemon"],
)
def test_only_an_image_that_is_missing_is_to_be_built_or_pulled(engine: Engine, stderr: str, is_missing: bool) -> None:
    verb = inspect_image(engine, "x")
    next(verb)
    with pytest.raises(UnavailableError) as error:
        verb.send((Output(returncode=1, stderr=stderr + "\n"),))
    assert stderr in str(error.value)
    assert (f"ddpctl image build or {engine} pull" in str(error.value)) == is_missing
