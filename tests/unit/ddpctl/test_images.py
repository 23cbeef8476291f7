"""What engines say of images, and the command lines that ask, build and push."""

import json
from pathlib import Path

import pytest
from tests.e2e import driver
from tests.in_process import ddpctl
from tests.wording import Wording

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


def test_docker_and_podman_tell_the_same() -> None:
    bare = {**SAID, "Id": "a" * 64}  # podman leaves the algorithm out
    assert read_inspect("me/train:1", json.dumps([bare])) == image()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[{}]", "[1]", '[{"Id": 1}]'],
    ids=["nothing", "no image", "no list", "an empty image", "a number", "an id alone"],
)  # fmt: skip
def test_what_is_no_answer_is_refused(text: str, wording: Wording) -> None:
    with pytest.raises(ValueError, match="image inspect") as raised:
        read_inspect("x", text)
    wording(str(raised.value).partition(": ")[0])  # the rest is Python's


def test_the_same_image_by_id_or_by_a_digest(wording: Wording) -> None:
    assert difference(image(), image(RepoDigests=None)) == ""
    assert difference(image(), image(Id="sha256:" + "b" * 64)) == ""  # another engine's idea of an ID
    other = image(Id="sha256:" + "b" * 64, RepoDigests=["me/train@sha256:" + "e" * 64])
    wording(difference(image(), other), there="e" * 64, wanted="d" * 64)
    by_id = difference(image(RepoDigests=[]), image(Id="sha256:" + "b" * 64, RepoDigests=[]))
    wording(by_id, there="b" * 64, wanted="a" * 64)


def test_a_pin_is_the_registrys_digest_or_the_id() -> None:
    assert pin(image()) == "sha256:" + "d" * 64
    assert pin(image(RepoDigests=[])) == "sha256:" + "a" * 64


def test_build() -> None:
    args = ("TORCH=2.11.0", "BASE=python:3.12-slim")
    line = build_line("docker", tag="me/train:1", dockerfile="docker/Dockerfile", context=".", build_args=args)
    assert " ".join(line) == (
        "docker build --file docker/Dockerfile --tag me/train:1 "
        "--build-arg TORCH=2.11.0 --build-arg BASE=python:3.12-slim ."
    )


def test_shown_to_a_person() -> None:
    assert show(image(), "python 3.11.7\ntorch 2.13.0\n") == [
        "me/train:1  1.2 GB in 2 layers, linux/amd64",
        f"  id           sha256:{'a' * 64}",
        f"  digest       me/train@sha256:{'d' * 64}",
        "  created      2026-11-20T12:00:00Z",
        "  user         10001:0",
        "  entry point  /usr/bin/tini -- ddprun",
        "  inside       python 3.11.7, torch 2.13.0",
    ]


@pytest.mark.parametrize(
    ("size", "words"), [(999, "999 B"), (1500, "1.5 kB"), (2_000_000, "2.0 MB"), (10**9, "1.0 GB")]
)
def test_sizes(size: int, words: str) -> None:
    assert human_size(size) == words


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("box1", Host(address="box1")),
        ("alice@box1:2222", Host(address="box1", user="alice", port=2222)),
        ("[fe80::1]:22", Host(address="fe80::1", port=22)),
    ],
)
def test_hosts(text: str, host: Host) -> None:
    assert parse_host(text) == host


@pytest.mark.parametrize("text", ["", "@box1", "box1:ssh", "-oProxyCommand=x", "alice@"])
def test_no_hosts(text: str, wording: Wording) -> None:
    with pytest.raises(UsageError) as raised:
        parse_host(text)
    wording(raised.value)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("image build", 66),
        ("image build -f x", 66),
        ("image build UPPER", 2),
        ("image inspect x", 69),
        ("image ship", 2),
        ("image ship --image x a/b", 2),
    ],
)
def test_what_goes_wrong_is_one_line(line: str, code: int, tmp_path: Path, wording: Wording) -> None:
    done = ddpctl(*line.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith("ddpctl: ")
    assert done.stderr.count("\n") == 1
    wording(done.stderr)


def test_an_option_is_no_host() -> None:
    done = driver.ddpctl("image", "ship", "-oProxyCommand=x")
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
    ("engine", "stderr"),
    [
        ("docker", "Error response from daemon: No such image: x:latest"),
        ("podman", "Error: x: image not known"),
        ("docker", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"),
    ],
    ids=["docker", "podman", "no daemon"],
)
def test_an_image_that_is_not_there_and_an_engine_that_is_not(engine: Engine, stderr: str, wording: Wording) -> None:
    verb = inspect_image(engine, "x")
    next(verb)
    with pytest.raises(UnavailableError) as error:
        verb.send((Output(returncode=1, stderr=stderr + "\n"),))
    wording(error.value)
