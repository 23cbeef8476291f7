"""What engines say of images, the commands that build and push one, and the verbs that copy it to hosts."""

import hashlib
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.in_process import ddpctl
from tests.messages import assert_names, refused
from tests.unit.ddpctl.answers import only, perform

from ddpctl.command import Command, Host, Output
from ddpctl.commands.image import parse_host
from ddpctl.errors import DdpctlError, UnavailableError, UsageError
from ddpctl.files.images import Image, difference, read_inspect
from ddpctl.files.pull import Place, finish, pull_places, survey
from ddpctl.operations import image_transfer
from ddpctl.operations.image_transfer import Blob, Survey

BOX1, BOX2 = Host(address="box1"), Host(address="box2", user="alice", port=2222)
LOW, HIGH, CONFIG = "1" * 64, "2" * 64, "c" * 64
LAYERS = [f"sha256:{LOW}", f"sha256:{HIGH}", f"sha256:{LOW}"]
PLATFORM = {"Created": "", "Os": "linux", "Architecture": "amd64", "Size": 10**9}
INSPECTED = json.dumps([{"Id": f"sha256:{CONFIG}", "RootFS": {"Layers": LAYERS}, **PLATFORM}])
IMAGE = read_inspect("me/train:1", INSPECTED)


def test_only_what_is_missing_is_packed_and_equal_layers_once() -> None:
    manifest = json.dumps([{"Config": f"{CONFIG}.json", "Layers": ["a/layer.tar", "b/layer.tar", "link/layer.tar"]}])
    verb = image_transfer.pack("podman", IMAGE, frozenset({LOW}), "zst", "/cache", "/cache/ship-1")
    stdouts = {"manifest.json": manifest, f"{CONFIG}.json plain": "9\n", "a/layer.tar": "700\n"}
    commands, blobs = perform(verb, {part: Output(returncode=0, stdout=stdout) for part, stdout in stdouts.items()})
    assert blobs == (
        Blob(digest=CONFIG, name=f"{CONFIG}.json", path=f"/cache/{CONFIG}.json", size=9),
        (Blob(digest=LOW, name=f"{LOW}.tar.zst", path=f"/cache/{LOW}.tar.zst", size=700),),
    )
    assert [command.argv[4:] if command.argv[0] == "sh" else command.argv for command in commands] == [
        ("podman", "save", "--format", "docker-archive", "--output", "/cache/ship-1/image.tar", "me/train:1"),
        ("tar", "-xOf", "/cache/ship-1/image.tar", "manifest.json"),
        ("/cache/ship-1/image.tar", f"{CONFIG}.json", f"/cache/{CONFIG}.json", "plain"),
        ("/cache/ship-1/image.tar", "a/layer.tar", f"/cache/{LOW}.tar.zst", "zstd -q -T0 -3"),
        ("find", "/cache", "-maxdepth", "1", "-type", "f", "-mtime", "+30", "-delete"),
    ]


def test_images_that_are_packed_at_the_same_time_share_no_file(tmp_path: Path) -> None:
    commands: list[Command] = []
    executor = SimpleNamespace(perform=lambda verb: perform(verb, {"save": Output(returncode=1)}, commands)[1])
    context: Any = SimpleNamespace(executor=executor, emit=print)
    with pytest.raises(UnavailableError):
        image_transfer._pack(context, "docker", IMAGE, [Survey(host=BOX1)], tmp_path)
    path = Path(only(commands, "save").argv[-2])
    assert (path.parent.parent, path.parent.exists()) == (tmp_path, False)


def test_a_blob_that_arrives_incomplete_is_kept_and_a_corrupt_one_is_not(tmp_path: Path) -> None:
    content = os.urandom(1000)
    digest, cache = hashlib.sha256(content).hexdigest(), tmp_path / ".cache/ddpctl/images"
    cache.mkdir(parents=True)

    def receive(data: bytes, start: int) -> tuple[int, list[str]]:
        survey = Survey(host=BOX1, files={"blob.json.part": start})
        blob = Blob(digest=digest, name="blob.json", path="/cache/blob", size=1000)
        (command,), _ = perform(image_transfer.send(survey, blob), {})
        assert command.transfer
        assert command.transfer.reads
        assert command.transfer.reads.start in (0, 400)
        environ = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(command.argv, input=data, env=environ, capture_output=True, timeout=30, check=False)
        return done.returncode, [path.name for path in cache.iterdir()]

    assert receive(content[:400], 0) == (69, ["blob.json.part"])
    assert receive(content[400:], 400) == (0, ["blob.json"])
    assert (cache / "blob.json").read_bytes() == content
    (cache / "blob.json").unlink()
    assert receive(content[::-1], 2000) == (65, []), "a part that is longer than the blob is sent again"


def test_a_host_loads_what_it_has_under_the_images_name() -> None:
    names = (f"{LOW}.tar.zst", f"{HIGH}.tar.gz", f"{LOW}.tar.zst")
    config = Blob(digest=CONFIG, name=f"{CONFIG}.json")
    verb = image_transfer.load("docker", BOX1, IMAGE, config, names)
    commands, image = perform(verb, {"image inspect": Output(returncode=0, stdout=INSPECTED)})
    assert image.id == IMAGE.id
    engine, manifest, *rest = commands[0].argv[4:]
    assert (engine, rest) == ("docker", [f"{CONFIG}.json", f"{LOW}.tar.zst", f"{HIGH}.tar.gz"])
    assert json.loads(manifest) == [
        {
            "Config": f"{CONFIG}.json",
            "RepoTags": ["me/train:1"],
            "Layers": [f"{LOW}.tar", f"{HIGH}.tar", f"{LOW}.tar"],
        }
    ]


RECORD = {
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
    return read_inspect("me/train:1", json.dumps([{**RECORD, **changes}]))


def test_an_image_is_the_same_by_its_id_or_by_a_digest_on_docker_and_podman() -> None:
    bare = {**RECORD, "Id": "a" * 64}  # podman leaves the algorithm out
    assert read_inspect("me/train:1", json.dumps([bare])) == image()
    assert difference(image(), image(RepoDigests=None)) == ""
    assert difference(image(), image(Id="sha256:" + "b" * 64)) == ""  # another engine's idea of an ID
    other = image(Id="sha256:" + "b" * 64, RepoDigests=["me/train@sha256:" + "e" * 64])
    assert_names(difference(image(), other), "me/train:1", f"sha256:{'e' * 64}", f"sha256:{'d' * 64}")
    by_id = difference(image(RepoDigests=[]), image(Id="sha256:" + "b" * 64, RepoDigests=[]))
    assert_names(by_id, "me/train:1", f"sha256:{'b' * 64}", f"sha256:{'a' * 64}")


@pytest.mark.parametrize("text", ["", "@box1", "box1:ssh", "-oProxyCommand=x", "alice@"])
def test_a_text_that_is_no_host_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=f"^'{text}' "):
        parse_host(text)


def test_a_dry_run_builds_nothing(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("")
    (tmp_path / "ddpctl.yaml").write_text("job:\n  image: me/train:1\n")
    done = ddpctl("image", "build", "--dry-run", "--build-arg", "A=b c", cwd=tmp_path)
    assert done.stdout == "DOCKER_BUILDKIT=1 docker build --file Dockerfile --tag me/train:1 --build-arg 'A=b c' .\n"
    done = ddpctl("image", "push", "--dry-run", "--engine", "podman", cwd=tmp_path)
    assert done.stdout == "podman push me/train:1\n"


def test_a_pull_lists_results_and_no_secrets(tmp_path: Path) -> None:
    names = (
        "secrets",
        "store.secret",
        "task-1/secrets",
        "task-1/store.secret",
        "task-1/node-0/rank-0.log",
        "out/store.secret",
        "project/train.py",
        "out/project/metrics/a.csv",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    place = Place(name="box1", shell=Command(argv=("sh",)), folders={"": str(tmp_path)})
    (commands,) = next(pull_places("night", [place], str(tmp_path / "here")))
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=commands.stdin, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.partition(":")[2] for line in done.stdout.split("\0") if line} == {
        "./task-1/node-0/rank-0.log",
        "./out/store.secret",
        "./out/project/metrics/a.csv",
    }


@pytest.mark.parametrize("name", ["./../../.ssh/authorized_keys", ".//etc/passwd"])
def test_a_host_cannot_name_a_file_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    place = Place(name="box1", shell=Command(argv=("sh",)), folders={"": "/runs/night"})
    listing = Output(returncode=0, stdout=f"3 1700000000 regular file:{name}\0")
    with refused(DdpctlError, code=70):
        perform(pull_places("night", [place], str(tmp_path)), {"": listing})


def test_a_file_has_its_name_only_with_its_content(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / f".{name}.part").write_text("hello")
    sums = {"good": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", "bad": "0" * 64}
    done = finish(tmp_path, [(name, 1_700_000_000, sums[name]) for name in sums])
    assert done == {"whole": ["good"], "wrong": ["bad"]}
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    listing = survey(tmp_path, ["good", "bad", "checkpoints/step-00000001.pt"])
    assert (listing["files"], listing["parts"]) == ({"good": [5, 1_700_000_000]}, {})
