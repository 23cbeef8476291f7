"""ddpctl.yaml and flags → Settings: every error, and what stands in the file arrives as written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.loading import KINDS, Local, Ssh, load
from tests.wording import Wording

from ddpctl import config
from ddpctl.errors import ConfigError, NoInputError, UsageError
from ddpctl.spec import JobSpec, check_time, time_s

ERRORS = Path(__file__).parents[2] / "data" / "config" / "errors.txt"


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
    assert (str(raised.value), raised.value.code) == (errors, 78)


@pytest.mark.parametrize(
    ("data", "place"),
    [
        pytest.param(b"job: {name: \xff}\n", "1:13", id="no UTF-8"),
        pytest.param("jöb:\n  näme: ".encode() + b"\xff", "2:9", id="no UTF-8 after UTF-8"),
        pytest.param(b"\xff\xfej\0o\0b\0", "1:1", id="UTF-16"),
        pytest.param(b"job:\n  name: a\0\n", "2:10", id="NUL"),
        pytest.param(b"\x7fELF\x02", "1:1", id="a program"),
        pytest.param(b"#" + b"x" * 1_000_000, "1:1", id="too large"),
        pytest.param(b"job: {gpus: %s}\n" % (b"9" * 5000), "1:13", id="5000 digits"),
        pytest.param(b"job:\r\n  gpus: 0\r\n", "2:9", id="CRLF"),
    ],
)
def test_a_file_that_is_not_text_or_too_large(data: bytes, place: str, wording: Wording) -> None:
    with pytest.raises(ConfigError) as raised:
        load(data)
    assert (str(raised.value).split(": ")[0], raised.value.code) == (f"ddpctl.yaml:{place}", 78)
    wording(raised.value)


@pytest.mark.parametrize("name", ["missing.yaml", "folder.yaml", "pipe.yaml", "a\nb.yaml", "nul\0.yaml"])
def test_a_file_that_cannot_be_read(name: str, folder: Path, wording: Wording) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    with pytest.raises(NoInputError) as raised:
        config.load(file=Path(name), profile=None, target=None, overrides={}, kinds=KINDS)
    wording(raised.value)


def test_the_file_is_the_named_one_else_the_one_that_is_there(folder: Path, wording: Wording) -> None:
    assert config.find_file(None, folder) is None
    (folder / "ddpctl.yaml").touch()
    (folder / "other.yaml").touch()
    assert config.find_file(None, folder) == Path("ddpctl.yaml")
    (folder / "inner").mkdir()
    (folder / "inner" / "ddpctl.yaml").touch()
    assert config.find_file(None, folder / "inner") == folder / "inner" / "ddpctl.yaml"
    assert config.find_file(Path("other.yaml"), folder) == Path("other.yaml")
    with pytest.raises(NoInputError) as raised:
        config.find_file(Path("none.yaml"), folder)
    wording(raised.value)


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
  hang_timeout: 900
"""
    assert job(text) == JobSpec(
        name="on",
        nodes="1:4",
        command=("train.py", "--epochs", "3", "010", "1e3", "12:30:45", "yes", "~", "0x1f", "", "a\tb", "2026-01-01"),
        env={"A": "1e3", "B": "on", "C": "0.10", "D": "", "E": "null", "F": "null", "G": "1_000", "yes": "no"},
        port=None,
        grace=15.0,
        join_timeout=5.0,
        hang_timeout=900.0,
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
    "flags",
    [
        pytest.param({"gpus": 0}, id="gpus"),
        pytest.param({"grace": float("nan")}, id="grace"),
        pytest.param({"join_timeout": 0.5}, id="join_timeout"),
        pytest.param({"hang_timeout": -1}, id="hang_timeout"),
        pytest.param({"device": "gpu"}, id="device"),
        pytest.param({"nodes": "2:1"}, id="nodes"),
        pytest.param({"env": {"1A": "s3cret"}}, id="env name"),
        pytest.param({"env": {"A": "s3cret\0"}}, id="env value"),
        pytest.param({"command": ["s3cret\0"]}, id="command"),
        pytest.param({"target": "laptp"}, id="target of the file"),
        pytest.param({"target": "lokal"}, id="target local"),
        pytest.param({"target": "moon"}, id="target"),
        pytest.param({"profile": "quik"}, id="profile"),
        pytest.param({"gpus": 65, "port": 0}, id="two flags"),
    ],
)
def test_a_bad_flag(flags: dict[str, Any], wording: Wording) -> None:
    with pytest.raises(UsageError) as raised:
        load(FILE, **flags)
    assert raised.value.code == 2
    wording(raised.value)


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
    ("text", "kind"),
    [("", UsageError), (TWO, UsageError), ("targets: {a: {kind: ssh}}", ConfigError)],
    ids=["no target", "two targets", "a target without hosts"],
)
def test_a_kind_that_leads_to_no_target(text: str, kind: type[Exception], wording: Wording) -> None:
    with pytest.raises(kind) as raised:
        load(text, target="ssh")
    wording(raised.value)


@pytest.mark.parametrize(
    ("given", "memory", "size"),
    [(None, None, "8Gi"), (None, "64Gi", "8Gi"), (None, "4Gi", "1Gi"), (None, "2Gi", "512Mi"), (None, "1Mi", "1Mi"),
     (None, "1Ti", "8Gi"), ("2Gi", "4Gi", "2Gi")],
)  # fmt: skip
def test_shared_memory_is_a_part_of_memory(given: str | None, memory: str | None, size: str) -> None:
    assert JobSpec(shm=given, memory=memory).shm_size == size


@pytest.mark.parametrize(
    "flags", [{"profile": "quick"}, {"target": "boxes"}, {"target": "ssh"}], ids=["profile", "target", "kind"]
)
def test_what_only_a_file_has(flags: dict[str, str], folder: Path, wording: Wording) -> None:
    with pytest.raises(UsageError) as raised:
        load(**flags)
    assert str(raised.value).endswith(f"no ddpctl.yaml in {folder})")
    wording(raised.value)


def test_a_bad_flag_beside_a_bad_file(wording: Wording) -> None:
    with pytest.raises(ConfigError) as raised:
        load("job: {gpus: 0}\ntarget: moon\n", gpus=0, profile="p")
    assert [line.split(": ")[0] for line in str(raised.value).split("\n")] == [
        "ddpctl.yaml:1:13", "ddpctl.yaml:2:9", "--gpus", "--profile",
    ]  # fmt: skip
    wording(raised.value)


def test_importing_config_imports_no_pydantic() -> None:
    code = "import sys, ddpctl.config; print([name for name in ('pydantic', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("12h", 43200), ("2h30m", 9000), ("1d0h1m", 86460)])
def test_a_duration_in_seconds(text: str, seconds: int) -> None:
    assert time_s(check_time(text)) == seconds


@pytest.mark.parametrize("text", ["", "0s", "h", "5", "1.5h", "-1h", "30m2h", "2h 30m", "1000000000s"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="whole numbers with d, h, m or s"):
        check_time(text)
