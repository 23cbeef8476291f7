"""The verbs that copy an image to hosts: what they run, and what they make of the answers."""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.ddpctl.answers import only, perform

from ddpctl.command import Command, FilePart, Host, Output, Transfer
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


def test_images_that_are_packed_at_the_same_time_share_no_file(tmp_path: Path) -> None:
    asked: list[Command] = []
    executor = SimpleNamespace(perform=lambda verb: perform(verb, {"save": Output(returncode=1)}, asked)[1])
    context: Any = SimpleNamespace(executor=executor, emit=print)
    with pytest.raises(UnavailableError):
        image_transfer._pack(context, "docker", IMAGE, [Survey(host=BOX1)], tmp_path)
    path = Path(only(asked, "save").argv[-2])
    assert (path.parent.parent, path.parent.exists()) == (tmp_path, False)


def test_the_rest_of_a_blob_goes_over_stdin() -> None:
    blob = Blob(digest=LOW, name=f"{LOW}.tar.gz", path="/cache/x y", size=700)
    survey = Survey(host=BOX2, files={f"{LOW}.tar.gz.part": 695})
    (command,), sent = perform(image_transfer.send(survey, blob), {})
    part = FilePart(path="/cache/x y", start=695, length=5)
    assert (sent, command.transfer) == (5, Transfer(num_bytes=5, num_files=1, reads=part))
    assert command.argv[4:] == (blob.name, "695", "700", LOW)
    longer = Survey(host=BOX2, files={f"{LOW}.tar.gz.part": 701})
    assert perform(image_transfer.send(longer, blob), {})[1] == 700
    assert perform(image_transfer.send(Survey(host=BOX2, files={blob.name: 700}), blob), {}) == ([], 0)
    lost = Output(returncode=255, stderr="the connection was lost (the host is gone)")
    with pytest.raises(UnavailableError, match="the host is gone"):
        perform(image_transfer.send(survey, blob), {"": lost})
    with pytest.raises(UnavailableError, match=LOW[:12]):
        perform(image_transfer.send(survey, blob), {"": Output(returncode=65)})


def test_a_blob_that_arrives_incomplete_is_kept_and_a_corrupt_one_is_not(tmp_path: Path) -> None:
    content = os.urandom(1000)
    digest, cache = hashlib.sha256(content).hexdigest(), tmp_path / ".cache/ddpctl/images"
    cache.mkdir(parents=True)

    def receive(data: bytes, start: int) -> tuple[int, list[str]]:
        survey = Survey(host=BOX1, files={"blob.json.part": start})
        blob = Blob(digest=digest, name="blob.json", path="/cache/blob", size=1000)
        (command,), _ = perform(image_transfer.send(survey, blob), {})
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command.argv, input=data, env=environ, capture_output=True, timeout=30, check=False)
        return done.returncode, [path.name for path in cache.iterdir()]

    assert receive(content[:400], 0) == (69, ["blob.json.part"])
    assert receive(content[400:], 400) == (0, ["blob.json"])
    assert (cache / "blob.json").read_bytes() == content
    (cache / "blob.json").unlink()
    assert receive(content[::-1], 0) == (65, [])


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
