"""The verbs that copy an image to hosts: what they run, and what they make of the answers."""

import json

import pytest
from tests.unit.ddpctl.answers import perform

from ddpctl.command import FilePart, Host, Output, shell_line
from ddpctl.errors import UnavailableError
from ddpctl.files.images import Image
from ddpctl.operations import image_transfer
from ddpctl.operations.image_transfer import Blob, Survey

BOX1, BOX2 = Host(address="box1"), Host(address="box2", user="alice", port=2222)


LOW, HIGH, CONFIG = "1" * 64, "2" * 64, "c" * 64


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


def test_a_survey_lists_each_hosts_layers_or_its_problem() -> None:
    first = Output(returncode=0, stdout=f"zstd\n700 {LOW}.tar.zst\n12 {HIGH}.tar.zst.part\n")
    failed = Output(returncode=69, stderr="x\nCannot connect to the Docker daemon\n")
    none = Output(returncode=1, stderr="No such image")
    verb = image_transfer.survey_hosts("docker", "me/train:1", (BOX1, BOX2))
    asked, surveys = perform(verb, {"image inspect": none, "": {str(BOX1): first, str(BOX2): failed}})
    assert surveys == (
        Survey(host=BOX1, has_zstd=True, files={f"{LOW}.tar.zst": 700, f"{HIGH}.tar.zst.part": 12}),
        Survey(host=BOX2, problem="Cannot connect to the Docker daemon"),
    )
    assert (surveys[0].blob_of(LOW), surveys[0].blob_of(HIGH)) == (f"{LOW}.tar.zst", None)
    assert [command.host for command in asked] == [BOX1, BOX1, BOX2, BOX2]
    assert asked[1].argv == ("docker", "image", "inspect", "me/train:1")


def test_only_what_is_missing_is_packed_and_equal_layers_once() -> None:
    manifest = json.dumps([{"Config": f"{CONFIG}.json", "Layers": ["a/layer.tar", "b/layer.tar", "link/layer.tar"]}])
    verb = image_transfer.pack("podman", IMAGE, frozenset({LOW}), "zst", "/cache", "/cache/ship-1")
    stdouts = {"manifest.json": manifest, f"{CONFIG}.json plain": "9\n", "a/layer.tar": "700\n"}
    asked, blobs = perform(verb, {part: Output(returncode=0, stdout=stdout) for part, stdout in stdouts.items()})
    assert blobs == (
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


def test_a_piece_of_a_blob_goes_over_stdin() -> None:
    size = image_transfer.PART_BYTES + 5
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz", path="/cache/x y", size=size)
    (command,), position = perform(image_transfer.send(BOX2, blob, image_transfer.PART_BYTES), {})
    assert (position, command.part) == (size, FilePart(path="/cache/x y", start=image_transfer.PART_BYTES, length=5))
    assert shell_line(command).startswith(
        f"tail -c +{image_transfer.PART_BYTES + 1} '/cache/x y' | head -c 5 | ssh -l alice -p 2222 -- box2 "
    )
    lost = Output(returncode=255, stderr="the connection was lost (the host is gone)")
    with pytest.raises(UnavailableError, match="the host is gone"):
        perform(image_transfer.send(BOX2, blob, 0), {"": lost})


def test_a_corrupt_blob_is_named() -> None:
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz")
    with pytest.raises(UnavailableError, match=LOW[:12]):
        perform(image_transfer.check(BOX1, blob), {"": Output(returncode=65)})


def test_a_host_loads_what_it_has_under_the_images_name() -> None:
    names = (f"{LOW}.tar.zst", f"{HIGH}.tar.gz", f"{LOW}.tar.zst")
    config = Blob(digest=CONFIG, name=f"{CONFIG}.json")
    verb = image_transfer.load("docker", BOX1, IMAGE, config, names)
    asked, image = perform(verb, {"image inspect": Output(returncode=0, stdout=INSPECTED)})
    assert image.id == IMAGE.id
    engine, manifest, *rest = asked[0].argv[4:]
    assert (engine, rest) == ("docker", [f"{CONFIG}.json", f"{LOW}.tar.zst", f"{HIGH}.tar.gz"])
    assert json.loads(manifest) == [
        {
            "Config": f"{CONFIG}.json",
            "RepoTags": ["me/train:1"],
            "Layers": [f"{LOW}.tar", f"{HIGH}.tar", f"{LOW}.tar"],
        }
    ]
