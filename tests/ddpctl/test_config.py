"""ddpctl.yaml and flags → Settings: every error's whole text, and what stands in the file arrives as written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ddpctl.loading import KINDS, Local, Ssh, load

from ddpctl import config
from ddpctl.errors import ConfigError, NoInputError, UsageError
from ddpctl.spec import JobSpec

ERRORS = Path(__file__).parents[1] / "data" / "config" / "errors.txt"


def job(text: str, **flags: Any) -> JobSpec:
    return load(text, **flags).job


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bad_files() -> list[Any]:
    cases = [case.split("----\n") for case in ERRORS.read_text().split("====\n")]
    return [
        pytest.param(text, errors.rstrip("\n"), id=errors.split(":", 1)[1].split("\n")[0]) for text, errors in cases
    ]


# In errors.txt: the file, "----", what ddpctl says of it, "====".
@pytest.mark.parametrize(("text", "errors"), bad_files())
def test_a_bad_file_is_refused_with_all_that_is_wrong_in_it(text: str, errors: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert (str(raised.value), raised.value.exit_code) == (errors, 78)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"job: {name: \xff}\n", "ddpctl.yaml:1:13: the byte 0xff is not UTF-8"),
        ("jöb:\n  näme: ".encode() + b"\xff", "ddpctl.yaml:2:9: the byte 0xff is not UTF-8"),
        (b"\xff\xfej\0o\0b\0", "ddpctl.yaml:1:1: the byte 0xff is not UTF-8"),
        (b"job:\n  name: a\0\n", "ddpctl.yaml:2:10: the character U+0000 is not allowed"),
        (b"\x7fELF\x02", "ddpctl.yaml:1:1: the character U+007F is not allowed"),
        (b"#" + b"x" * 1_000_000, "ddpctl.yaml:1:1: the file is larger than 1000000 bytes"),
        (b"job: {gpus: %s}\n" % (b"9" * 5000), f"ddpctl.yaml:1:13: gpus: '{'9' * 55}...' is no whole number"),
        (b"job:\r\n  gpus: 0\r\n", "ddpctl.yaml:2:9: gpus: 0 is too small: from 1 to 64"),
    ],
)
def test_a_file_that_is_no_text_for_us(data: bytes, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(data)
    assert str(raised.value) == error


def test_a_file_that_cannot_be_read(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    errors = {}
    for name in ("missing.yaml", "folder.yaml", "pipe.yaml", "a\nb.yaml", "nul\0.yaml"):
        with pytest.raises(NoInputError) as raised:
            config.load(file=Path(name), profile=None, target=None, overrides={}, kinds=KINDS)
        errors[name] = str(raised.value)
    assert errors == {
        "missing.yaml": "missing.yaml: No such file or directory",
        "folder.yaml": "folder.yaml: not a regular file",
        "pipe.yaml": "pipe.yaml: not a regular file",
        "a\nb.yaml": r"a\nb.yaml: No such file or directory",
        "nul\0.yaml": r"nul\x00.yaml: embedded null byte",
    }


def test_the_file_is_the_named_one_else_the_one_that_is_there(folder: Path) -> None:
    assert config.find_file(None, folder) is None
    (folder / "ddpctl.yaml").touch()
    (folder / "other.yaml").touch()
    assert config.find_file(None, folder) == Path("ddpctl.yaml")
    (folder / "inner").mkdir()
    (folder / "inner" / "ddpctl.yaml").touch()
    assert config.find_file(None, folder / "inner") == folder / "inner" / "ddpctl.yaml"
    assert config.find_file(Path("other.yaml"), folder) == Path("other.yaml")
    with pytest.raises(NoInputError, match=r"^none\.yaml: there is no such file$"):
        config.find_file(Path("none.yaml"), folder)


@pytest.mark.parametrize(
    "text", [None, "", "# nothing\n", "job:\n", "---\n", "null\n", "\ufeff", "{}", "job: {}\ntargets: ~\n"]
)
def test_nothing_said_is_the_defaults(text: str | None) -> None:
    assert load(text) == config.Settings(
        job=JobSpec(),
        target="local",
        kind="local",
        options=Local(),
        why="the default",
        file=None if text is None else Path("ddpctl.yaml"),
    )


def test_text_is_what_stands_in_the_file() -> None:
    text = """
job:
  name: on
  nodes: 1:4
  command: [train.py, --epochs, 3, 010, 1e3, 12:30:45, yes, ~, 0x1f, '', "a\\tb", 2026-01-01]
  env: {A: 1e3, B: on, C: 0.10, D: '', E: "null", F: null, G: 1_000, yes: no}
  port: ~
  grace: 1.5e+1
  join_timeout: 5
"""
    assert job(text) == JobSpec(
        name="on",
        nodes="1:4",
        command=("train.py", "--epochs", "3", "010", "1e3", "12:30:45", "yes", "~", "0x1f", "", "a\tb", "2026-01-01"),
        env={"A": "1e3", "B": "on", "C": "0.10", "D": "", "E": "null", "F": "null", "G": "1_000", "yes": "no"},
        port=None,
        grace=15.0,
        join_timeout=5.0,
    )


def test_an_alias_stands_for_its_value() -> None:
    assert job("job: &j {gpus: 2}\nprofiles: {p: *j}\n") == JobSpec(gpus=2)


FILE = """
job: {gpus: 2, nodes: 2, env: {A: file, B: file, C: file}}
target: lab
targets:
  lab: {kind: ssh, hosts: [a, b], user: null, check: false, tries: 3}
  laptop: {kind: local}
profiles:
  quick: {gpus: 1, env: {B: profile, C: profile}}
"""


def test_flag_over_profile_over_file_over_default() -> None:
    found = load(FILE, profile="quick", nodes="3", port=None, command=["x.py"], env={"C": "flag"})
    assert found.job == JobSpec(gpus=1, nodes="3", command=("x.py",), env={"A": "file", "B": "profile", "C": "flag"})
    assert job(FILE).gpus == 2
    assert job(FILE, gpus=4).gpus == 4


def test_who_chose_the_target() -> None:
    lab = Ssh(hosts=("a", "b"), check=False, tries=3)
    chosen = [load(FILE), load(FILE, target="laptop"), load(FILE, target="local"), load("")]
    assert [(found.target, found.kind, found.options, found.why) for found in chosen] == [
        ("lab", "ssh", lab, "ddpctl.yaml"),
        ("laptop", "local", Local(), "--target"),
        ("local", "local", Local(), "--target"),
        ("local", "local", Local(), "the default"),
    ]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"gpus": 0}, "--gpus: 0 is too small: from 1 to 64"),
        ({"grace": float("nan")}, "--grace: nan is not finite; write a number"),
        ({"join_timeout": 0.5}, "--join-timeout: 0.5 is too small: from 1"),
        ({"device": "gpu"}, "--device: 'gpu' is none of auto, cuda, cpu"),
        ({"nodes": "2:1"}, "--nodes: '2:1' is not allowed: a number of nodes from 1, or MIN:MAX such as 1:4"),
        ({"env": {"1A": "s3cret"}}, "--env: '1A' is no name of a variable: letters, digits and '_', no digit first"),
        ({"env": {"A": "s3cret\0"}}, "--env: the value of A holds a NUL byte"),
        ({"command": ["s3cret\0"]}, "-- SCRIPT: no NUL byte"),
        ({"target": "laptp"}, "--target: 'laptp' is no target; did you mean 'laptop'?"),
        ({"target": "lokal"}, "--target: 'lokal' is no target; did you mean 'local'?"),
        ({"target": "moon"}, "--target: 'moon' is no target; there are: lab, laptop, local"),
        ({"profile": "quik"}, "--profile: 'quik' is no profile; did you mean 'quick'?"),
        ({"gpus": 65, "port": 0}, "--gpus: 65 is too large: from 1 to 64\n--port: 0 is too small: from 1 to 65535"),
    ],
)
def test_a_bad_flag(asked: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError) as raised:
        load(FILE, **asked)
    assert (str(raised.value), raised.value.exit_code) == (error, 2)


TWO = "targets:\n  a: {kind: ssh, hosts: [a]}\n  b: {kind: ssh, hosts: [b]}\n"


def test_a_kind_is_the_files_only_target_of_it() -> None:
    found = [
        load(FILE, target="ssh"),
        load(FILE.replace("target: lab", "target: ssh")),
        load(TWO + "  ssh: {kind: ssh, hosts: [c]}\n", target="ssh"),
    ]
    assert [(one.target, one.kind, one.options.hosts, one.why) for one in found] == [
        ("lab", "ssh", ("a", "b"), "--target: the only target of kind ssh"),
        ("lab", "ssh", ("a", "b"), "ddpctl.yaml: the only target of kind ssh"),
        ("ssh", "ssh", ("c",), "--target"),
    ]


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("", UsageError, "--target: ssh needs hosts; write a target of this kind in ddpctl.yaml"),
        (TWO, UsageError, "--target: ssh: several targets are of this kind: write a or b"),
        ("targets: {a: {kind: ssh}}", ConfigError, "ddpctl.yaml:1:14: target 'a' needs 'hosts': list of text"),
    ],
)
def test_a_kind_that_leads_to_no_target(text: str, kind: type[Exception], error: str) -> None:
    with pytest.raises(kind) as raised:
        load(text, target="ssh")
    assert str(raised.value) == error


@pytest.mark.parametrize(
    ("given", "memory", "size"),
    [(None, None, "8Gi"), (None, "64Gi", "8Gi"), (None, "4Gi", "1Gi"), (None, "2Gi", "512Mi"), (None, "1Mi", "1Mi"),
     (None, "1Ti", "8Gi"), ("2Gi", "4Gi", "2Gi")],
)  # fmt: skip
def test_shared_memory_is_a_part_of_memory(given: str | None, memory: str | None, size: str) -> None:
    assert JobSpec(shm=given, memory=memory).shm_size == size


def test_a_profile_without_a_file() -> None:
    with pytest.raises(UsageError, match=r"^--profile: 'quick' is no profile; there is none$"):
        load(profile="quick")


def test_a_bad_flag_beside_a_bad_file() -> None:
    with pytest.raises(ConfigError) as raised:
        load("job: {gpus: 0}\ntarget: moon\n", gpus=0, profile="p")
    assert str(raised.value).split("\n") == [
        "ddpctl.yaml:1:13: gpus: 0 is too small: from 1 to 64",
        "ddpctl.yaml:2:9: target: 'moon' is no target; there are: local",
        "--gpus: 0 is too small: from 1 to 64",
        "--profile: 'p' is no profile; there is none",
    ]


def test_importing_config_imports_neither_pydantic_nor_yaml() -> None:
    code = "import sys, ddpctl.config; print([name for name in ('pydantic', 'yaml', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
