"""What is shown of a transfer, and where its bytes go; what a host may name in a pull."""

import os
import subprocess
from pathlib import Path

import pytest
from tests.messages import refused

from ddpctl.command import Command, FilePart, Output, Transfer
from ddpctl.errors import DdpctlError
from ddpctl.execution.transfers import pump
from ddpctl.files.pull import Place, finish, pull_places, survey


def test_a_stream_is_cut_into_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"0123456789")
    parts = (
        FilePart(path=str(tmp_path / "new/a"), start=0, length=3),
        FilePart(path=str(tmp_path / "empty"), start=0, length=0),
        FilePart(path=str(tmp_path / "b"), start=4, length=5),
    )
    read, write = os.pipe()
    os.write(write, b"abcDEFGHlost")
    os.close(write)
    progress: list[tuple[int, int]] = []
    with os.fdopen(read, "rb") as pipe, (tmp_path / "b").open("rb") as stdin:
        pump(
            Transfer(num_bytes=8, num_files=3, writes=parts),
            stdin.fileno(),
            pipe.fileno(),
            5.0,
            lambda *n: progress.append(n),
        )
    assert [(tmp_path / name).read_bytes() for name in ("new/a", "empty", "b")] == [b"abc", b"", b"0123DEFGH"]
    assert progress[-1] == (8, 3)


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
    (asked,) = next(pull_places("night", [place], str(tmp_path / "here")))
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(["/bin/sh"], input=asked.stdin, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.partition(":")[2] for line in done.stdout.split("\0") if line} == {
        "./task-1/node-0/rank-0.log",
        "./out/store.secret",
        "./out/project/metrics/a.csv",
    }


def pull_from(listing: str, into: Path) -> None:
    place = Place(name="box1", shell=Command(argv=("sh",)), folders={"": "/runs/night"})
    verb = pull_places("night", [place], str(into))
    (asked,) = next(verb)
    assert asked.stdin is not None
    verb.send((Output(returncode=0, stdout=listing),))


@pytest.mark.parametrize("name", ["./../../.ssh/authorized_keys", ".//etc/passwd"])
def test_a_host_cannot_name_a_file_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    with refused(DdpctlError, code=70):
        pull_from(f"3 1700000000 regular file:{name}\0", tmp_path)


def test_a_file_has_its_name_only_with_its_content(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / f".{name}.part").write_text("hello")
    sums = {"good": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824", "bad": "0" * 64}
    done = finish(tmp_path, [(name, 1_700_000_000, sums[name]) for name in sums])
    assert done == {"whole": ["good"], "wrong": ["bad"]}
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    listing = survey(tmp_path, ["good", "bad", "checkpoints/step-00000001.pt"])
    assert (listing["files"], listing["parts"]) == ({"good": [5, 1_700_000_000]}, {})
