"""The verbs that carry an image, fed with recorded answers; whole command lines."""

import json
from collections.abc import Sequence
from typing import TypeVar

import pytest
from tests.wording import Wording

from ddpctl import image_transfer
from ddpctl.command import Command, FilePart, Host, Output, Verb, shell_line
from ddpctl.errors import DdpctlError, UnavailableError
from ddpctl.image_transfer import Blob, Survey
from ddpctl.images import Image

T = TypeVar("T")
BOX1, BOX2 = Host(address="box1"), Host(address="box2", user="alice", port=2222)
LOW, HIGH, CONFIG = "1" * 64, "2" * 64, "c" * 64
OK = Output(returncode=0)
IMAGE = Image(
    reference="me/train:1",
    id=f"sha256:{CONFIG}",
    digests=(),
    layers=(f"sha256:{LOW}", f"sha256:{HIGH}", f"sha256:{LOW}"),
    size=10**9,
    created="",
    architecture="linux/amd64",
    user="root",
    entrypoint=(),
    labels={},
)
INSPECTED = json.dumps(
    [
        {
            "Id": IMAGE.id,
            "Created": "",
            "Architecture": "amd64",
            "Os": "linux",
            "Size": 10**9,
            "RootFS": {"Layers": list(IMAGE.layers)},
        }
    ]
)


def drive(verb: Verb[T], *answers: Sequence[Output]) -> tuple[T, list[Command]]:
    """What a verb returned, and the commands that it asked for."""
    asked: list[Command] = []
    try:
        commands = next(verb)
        for outputs in answers:
            asked += commands
            commands = verb.send(tuple(outputs))
    except StopIteration as stop:
        return stop.value, asked
    raise AssertionError(f"it asks for more: {commands}")


def test_hosts_say_what_they_have() -> None:
    first = Output(returncode=0, stdout=f"zstd\n700 {LOW}.tar.zst\n12 {HIGH}.tar.zst.part\n")
    failed = Output(returncode=69, stderr="x\nCannot connect to the Docker daemon\n")
    none = Output(returncode=1, stderr="No such image")
    surveys, asked = drive(
        image_transfer.survey_hosts("docker", "me/train:1", (BOX1, BOX2)), [first, none, failed, none]
    )
    assert surveys == (
        Survey(host=BOX1, has_zstd=True, files={f"{LOW}.tar.zst": 700, f"{HIGH}.tar.zst.part": 12}),
        Survey(host=BOX2, problem="Cannot connect to the Docker daemon"),
    )
    assert (surveys[0].blob_of(LOW), surveys[0].blob_of(HIGH)) == (f"{LOW}.tar.zst", None)
    assert [command.host for command in asked] == [BOX1, BOX1, BOX2, BOX2]
    assert asked[1].argv == ("docker", "image", "inspect", "me/train:1")


@pytest.mark.parametrize(("here", "there", "codec"), [(0, True, "zst"), (127, True, "gz"), (0, False, "gz")])
def test_zstd_where_all_have_it(here: int, there: bool, codec: str) -> None:
    surveys = (Survey(host=BOX1, has_zstd=True), Survey(host=BOX2, has_zstd=there))
    assert drive(image_transfer.choose_codec(surveys), [Output(returncode=here)])[0] == codec


def test_only_what_is_missing_is_packed_and_equal_layers_once() -> None:
    manifest = json.dumps([{"Config": f"{CONFIG}.json", "Layers": ["a/layer.tar", "b/layer.tar", "link/layer.tar"]}])
    verb = image_transfer.pack("podman", IMAGE, frozenset({LOW}), "zst", "/cache", "/cache/ship-1")
    answers = ([OK], [Output(returncode=0, stdout=manifest)], [Output(returncode=0, stdout="9\n")])
    made, asked = drive(verb, *answers, [Output(returncode=0, stdout="700\n")], [OK])
    assert made == (
        Blob(digest=CONFIG, name=f"{CONFIG}.json", path=f"/cache/{CONFIG}.json", size=9),
        (Blob(digest=LOW, name=f"{LOW}.tar.zst", path=f"/cache/{LOW}.tar.zst", size=700),),
    )
    assert [command.argv[4:] if command.argv[0] == "sh" else command.argv for command in asked] == [
        ("podman", "save", "--format", "docker-archive", "--output", "/cache/ship-1/image.tar", "me/train:1"),
        ("tar", "-xOf", "/cache/ship-1/image.tar", "manifest.json"),
        ("/cache/ship-1/image.tar", f"{CONFIG}.json", f"/cache/{CONFIG}.json", "plain"),
        ("/cache/ship-1/image.tar", "a/layer.tar", f"/cache/{LOW}.tar.zst", "zstd -q -T0 -3"),
        ("find", "/cache", "-maxdepth", "1", "-type", "f", "-mtime", "+30", "-delete"),
    ]


def test_a_newer_dockers_archive_is_read_as_well() -> None:
    text = json.dumps([{"Config": f"blobs/sha256/{CONFIG}", "Layers": [f"blobs/sha256/{LOW}"]}])
    assert image_transfer.read_manifest(text) == (f"blobs/sha256/{CONFIG}", (f"blobs/sha256/{LOW}",))


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '[{"Config": "x"}]'], ids=["nothing", "no list", "no image", "no layers"]
)
def test_what_is_no_archive_is_refused(text: str, wording: Wording) -> None:
    with pytest.raises(DdpctlError) as raised:
        image_transfer.read_manifest(text)
    wording(str(raised.value).partition(": ")[0])  # the rest is Python's


def test_a_piece_of_a_blob_goes_over_stdin(wording: Wording) -> None:
    size = image_transfer.PART_BYTES + 5
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz", path="/cache/x y", size=size)
    position, (command,) = drive(image_transfer.send(BOX2, blob, image_transfer.PART_BYTES), [OK])
    assert (position, command.part) == (size, FilePart(path="/cache/x y", start=image_transfer.PART_BYTES, length=5))
    assert shell_line(command).startswith(
        f"tail -c +{image_transfer.PART_BYTES + 1} '/cache/x y' | head -c 5 | ssh -l alice -p 2222 -- box2 "
    )
    lost = Output(returncode=255, stderr="the connection was lost (the host is gone)")
    with pytest.raises(UnavailableError) as raised:
        drive(image_transfer.send(BOX2, blob, 0), [lost])
    wording(raised.value)


def test_a_blob_that_came_wrong_is_named(wording: Wording) -> None:
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz")
    with pytest.raises(UnavailableError) as raised:
        drive(image_transfer.check(BOX1, blob), [Output(returncode=65)])
    wording(raised.value)


def test_a_host_loads_what_it_has_under_the_images_name() -> None:
    names = (f"{LOW}.tar.zst", f"{HIGH}.tar.gz", f"{LOW}.tar.zst")
    config = Blob(digest=CONFIG, name=f"{CONFIG}.json")
    verb = image_transfer.load("docker", BOX1, IMAGE, config, names)
    held, asked = drive(verb, [OK], [Output(returncode=0, stdout=INSPECTED)])
    assert held.id == IMAGE.id
    engine, manifest, *rest = asked[0].argv[4:]
    assert (engine, rest) == ("docker", [f"{CONFIG}.json", f"{LOW}.tar.zst", f"{HIGH}.tar.gz"])
    assert json.loads(manifest) == [
        {
            "Config": f"{CONFIG}.json",
            "RepoTags": ["me/train:1"],
            "Layers": [f"{LOW}.tar", f"{HIGH}.tar", f"{LOW}.tar"],
        }
    ]
