"""ddpctl.yaml and flags → Request: every error has its place, and each value is read as it is written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.ddpctl.loading import KINDS, Local, Ssh, check_errors, load, read_cases

from ddpctl.errors import ConfigError, NoInputError, UsageError
from ddpctl.job import config
from ddpctl.job.launch_plan import Plan, ddprun_args
from ddpctl.job.schema import json_schema
from ddpctl.job.spec import JobSpec, check_size, check_time, size_bytes, time_s

ERRORS = Path(__file__).parents[2] / "data" / "config" / "errors.txt"


def job(text: str, **flags: Any) -> JobSpec:
    return load(text, **flags).job


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# A file that is no text, or is too large.
NOT_TEXT = [
    pytest.param(b"job: {name: \xff}\n", ["1:13 | 0xff | UTF-8"], id="no UTF-8"),
    pytest.param("jöb:\n  näme: ".encode() + b"\xff", ["2:9 | 0xff | UTF-8"], id="no UTF-8 after UTF-8"),
    pytest.param(b"\xff\xfej\0o\0b\0", ["1:1 | 0xff | UTF-8"], id="UTF-16"),
    pytest.param(b"job:\n  name: a\0\n", ["2:10 | U+0000"], id="NUL"),
    pytest.param(b"\x7fELF\x02", ["1:1 | U+007F"], id="a program"),
    pytest.param(b"#" + b"x" * 1_000_000, ["1:1 | 1000000"], id="too large"),
    pytest.param(b"job: {gpus: %s}\n" % (b"9" * 5000), ["1:13 | gpus | 99999..."], id="5000 digits"),
    pytest.param(b"job:\r\n  gpus: 0\r\n", ["2:9 | gpus | 64"], id="CRLF"),
]


# In errors.txt: the file, "----", its errors, "====". An error is its line and column, and what its message names.
@pytest.mark.parametrize(("text", "errors"), [*read_cases(ERRORS), *NOT_TEXT])
def test_a_bad_file_is_refused_at_the_place_of_each_error_without_its_secrets(
    text: str | bytes, errors: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(text)
    assert raised.value.code == 78
    check_errors(str(raised.value), errors)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.yaml", "No such file"),
        ("folder.yaml", "not a regular file"),
        ("pipe.yaml", "not a regular file"),
        ("a\nb.yaml", "No such file"),
        ("nul\0.yaml", "null"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_on_one_line(name: str, reason: str, folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    with pytest.raises(NoInputError) as raised:
        config.load(file=Path(name), kinds=KINDS)
    assert raised.value.code == 66
    assert str(raised.value).startswith(f"{repr(name)[1:-1]}: ")
    assert reason in str(raised.value)


def test_the_file_is_the_named_one_else_the_one_that_is_there(folder: Path) -> None:
    assert config.find_file(None, folder) is None
    (folder / "ddpctl.yaml").touch()
    (folder / "other.yaml").touch()
    assert config.find_file(None, folder) == Path("ddpctl.yaml")
    (folder / "inner").mkdir()
    (folder / "inner" / "ddpctl.yaml").touch()
    assert config.find_file(None, folder / "inner") == folder / "inner" / "ddpctl.yaml"
    assert config.find_file(Path("other.yaml"), folder) == Path("other.yaml")
    with pytest.raises(NoInputError, match=r"^none\.yaml: "):
        config.find_file(Path("none.yaml"), folder)


@pytest.mark.parametrize(
    "text", [None, "", "# nothing\n", "job:\n", "---\n", "null\n", "\ufeff", "{}", "job: {}\ntargets: ~\n"]
)
def test_an_empty_file_gives_the_defaults(text: str | None) -> None:
    local = config.Request(job=JobSpec(), target="local", kind="local", options=Local(), target_source="the default")
    assert load(text) == local


def test_text_is_read_as_it_is_written() -> None:
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
    settings = load(FILE, profile="quick", nodes="3", command=["x.py"], env={"C": "flag"})
    assert settings.job == JobSpec(gpus=1, nodes="3", command=("x.py",), env={"A": "file", "B": "profile", "C": "flag"})
    assert job(FILE).gpus == 2
    assert job(FILE, gpus=4).gpus == 4


def test_settings_say_who_chose_the_target() -> None:
    """A kind is the file's only target of it."""
    lab = Ssh(hosts=("a", "b"), check=False, tries=3)
    for settings, expected in (
        (load(FILE), ("lab", "ssh", lab, "ddpctl.yaml")),
        (load(FILE, target="laptop"), ("laptop", "local", Local(), "--target")),
        (load(FILE, target="local"), ("local", "local", Local(), "--target")),
        (load(""), ("local", "local", Local(), "the default")),
        (load(FILE, target="ssh"), ("lab", "ssh", lab, "--target: the only target of kind ssh")),
        (
            load(FILE.replace("target: lab", "target: ssh")),
            ("lab", "ssh", lab, "ddpctl.yaml: the only target of kind ssh"),
        ),
        (load(TWO + "  ssh: {kind: ssh, hosts: [c]}\n", target="ssh"), ("ssh", "ssh", Ssh(hosts=("c",)), "--target")),
    ):
        assert (settings.target, settings.kind, settings.options, settings.target_source) == expected


TWO = "targets:\n  a: {kind: ssh, hosts: [a]}\n  b: {kind: ssh, hosts: [b]}\n"
# By what is bad: the file, the flags, and what the error begins with and names.
BAD_FLAGS: list[tuple[str, str | None, dict[str, Any], list[str]]] = [
    ("gpus", FILE, {"gpus": 0}, ["--gpus: 0", "1 to 64"]),
    ("device", FILE, {"device": "gpu"}, ["--device: 'gpu'", "auto, cuda, cpu"]),
    ("env name", FILE, {"env": {"1A": "s3cret"}}, ["--env: '1A'"]),
    ("env value", FILE, {"env": {"A": "s3cret\0"}}, ["--env: ", "NUL", "A"]),
    ("command", FILE, {"command": ["s3cret\0"]}, ["-- SCRIPT: ", "NUL"]),
    ("target", FILE, {"target": "moon"}, ["--target: 'moon'", "lab, laptop, local, ssh"]),
    ("two flags", FILE, {"gpus": 65, "port": 0}, ["--gpus: 65", "\n--port: 0"]),
    ("target without hosts", "targets: {a: {kind: ssh}}", {"target": "ssh"}, ["ddpctl.yaml:1:14: ", "'a'", "'hosts'"]),
    ("target without a file", None, {"target": "boxes"}, ["--target: 'boxes'", "local", "ddpctl.yaml", "FOLDER"]),
]


@pytest.mark.parametrize(("text", "flags", "facts"), [pytest.param(*row, id=name) for name, *row in BAD_FLAGS])
def test_a_bad_flag_is_named_with_its_value_unless_it_may_be_secret(
    text: str | None, flags: dict[str, Any], facts: list[str], folder: Path
) -> None:
    of_the_file = facts[0].startswith("ddpctl.yaml")
    with pytest.raises(ConfigError if of_the_file else UsageError) as raised:
        load(text, **flags)
    message = str(raised.value).replace(str(folder), "FOLDER")
    assert raised.value.code == (78 if of_the_file else 2)
    assert message.startswith(facts[0])
    assert [fact for fact in facts if fact not in message] == []
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("given", "memory", "size"),
    [(None, None, "8Gi"), (None, "64Gi", "8Gi"), (None, "4Gi", "1Gi"), (None, "2Gi", "512Mi"), (None, "1Mi", "1Mi"),
     (None, "1Ti", "8Gi"), ("2Gi", "4Gi", "2Gi")],
)  # fmt: skip
def test_shared_memory_is_a_part_of_memory(given: str | None, memory: str | None, size: str) -> None:
    assert JobSpec(shm=given, memory=memory).shm_size == size


def test_the_errors_of_a_file_and_of_the_flags_are_reported_together() -> None:
    with pytest.raises(ConfigError) as raised:
        load("job: {gpus: 0}\ntarget: moon\n", gpus=0, profile="p")
    assert [line.split(": ")[0] for line in str(raised.value).split("\n")] == [
        "ddpctl.yaml:1:13", "ddpctl.yaml:2:9", "--gpus", "--profile",
    ]  # fmt: skip


def test_importing_config_imports_no_pydantic() -> None:
    code = "import sys, ddpctl.job.config; print([name for name in ('pydantic', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_durations_and_sizes_may_have_the_units_of_slurm() -> None:
    seconds = {"90s": 90, "12h": 43200, "2h30m": 9000, "1d0h1m": 86460, "30-00:00:00": 2592000, "1-2": 93600,
               "0-02:30": 9000, "48:00:01": 172801}  # fmt: skip
    sizes = {"372G": 372 << 30, "372Gi": 372 << 30, "500M": 500 << 20, "1T": 1 << 40}
    assert {text: time_s(check_time(text)) for text in seconds} == seconds
    assert {text: size_bytes(check_size(text)) for text in sizes} == sizes


NO_DURATIONS = ("", "0s", "h", "5", "1.5h", "-1h", "30m2h", "2h 30m", "1000000000s", "2:30", "0-00:00:00", "1-")


@pytest.mark.parametrize("text", [*NO_DURATIONS, "64GB", "0G", "1.5G", "64g", "64"])
def test_a_duration_or_a_size_without_a_known_unit_is_refused(text: str) -> None:
    check, units = (check_time, "d, h, m or s") if text in NO_DURATIONS else (check_size, "Gi")
    with pytest.raises(ValueError, match=units):
        check(text)


def test_notices_and_commands_of_the_nodes_reach_ddprun() -> None:
    def arguments(keys: str) -> tuple[str, ...]:
        job = load(f"job: {{{keys}, command: [t.py]}}").job
        return ddprun_args(Plan(name="r", job=job, cwd="/", folder="/r", checkpoint_dir="/r/c"))

    assert arguments("secrets: [HOOK], notify: [$HOOK, $HOME/tell.sh done], notify_on: [failed, hang]") == (
        "--grace", "30", "--notify", "$HOOK", "--notify", "$HOME/tell.sh done", "--notify-on", "failed,hang", "t.py"
    )  # fmt: skip
    commands = "node_setup: [a b, c], node_teardown: [d], teardown_timeout: 90, stop_signal: USR1"
    assert arguments(commands) == (
        "--grace", "30", "--setup-timeout", "1800", "--teardown-timeout", "90", "--stop-signal", "USR1",
        "--node-setup", "a b", "--node-setup", "c", "--node-teardown", "d", "t.py",
    )  # fmt: skip
    assert job(f"job: {{{commands}}}").stop_s == 120, "a stop takes longer"


@pytest.mark.parametrize(
    "keys", ["notify: [$HOOK]", "notify: ['${HOOK}']", "notify: ['slack://a/b/c']", "notify_on: []", "notify_on: [end]"]
)
def test_a_notice_that_nobody_can_get_and_a_literal_address_are_refused(keys: str) -> None:
    with pytest.raises(ConfigError):
        load(f"job: {{{keys}}}")


def test_the_schema_has_the_fields_types_limits_and_defaults() -> None:
    schema = json_schema(KINDS)
    text, value = {"type": ["string", "number"]}, {"type": ["string", "number", "boolean"]}
    assert list(schema["properties"]) == ["job", "target", "targets", "profiles"]
    assert schema["properties"]["targets"]["additionalProperties"]["allOf"][1]["then"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "hosts"],
        "properties": {
            "kind": {"const": "ssh"},
            "hosts": {"description": "Where.", "type": ["array", "null"], "items": value},
            "user": {"description": "Who; null: you.", "anyOf": [text, {"type": "null"}], "default": None},
            "check": {"description": "Whether to look first.", "type": "boolean", "default": True},
            "tries": {"description": "How often.", "type": "integer", "minimum": 1, "default": 1},
        },
    }
    job_fields = schema["properties"]["job"]["properties"]
    assert [name for name, field in job_fields.items() if field.get("description")] == [*vars(JobSpec())]
