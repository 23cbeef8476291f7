"""Answers of engines, and how an image is shown."""

from pathlib import Path

import pytest
from tests.in_process import ddpctl
from tests.unit.ddpctl.test_image_transfer import image

from ddpctl.command import Output
from ddpctl.errors import UnavailableError
from ddpctl.files.images import Engine, human_size, pin, read_inspect, show
from ddpctl.operations.image_transfer import inspect_image


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[{}]", "[1]", '[{"Id": 1}]'],
    ids=["nothing", "no image", "no list", "an empty image", "a number", "an id alone"],
)  # fmt: skip
def test_an_answer_without_an_image_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="image inspect"):
        read_inspect("x", text)


def test_a_pin_is_the_registrys_digest_or_the_id() -> None:
    assert pin(image()) == "sha256:" + "d" * 64
    assert pin(image(RepoDigests=[])) == "sha256:" + "a" * 64


def test_the_command_that_builds_an_image(tmp_path: Path) -> None:
    args = ("TORCH=2.11.0", "BASE=python:3.12-slim")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "Dockerfile").touch()
    options = [word for arg in args for word in ("--build-arg", arg)]
    done = ddpctl("image", "build", "me/train:1", *options, "--dry-run", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == (
        "DOCKER_BUILDKIT=1 docker build --file docker/Dockerfile --tag me/train:1 "
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
