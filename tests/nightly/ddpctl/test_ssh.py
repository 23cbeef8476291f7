"""The target ssh starts a node on every host."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from tests.unit.ddpctl import test_ssh
from tests.unit.ddpctl.answers import OK, matching, perform
from tests.unit.ddpctl.ssh_answers import (
    ANSWERS,
    FACTS,
    GPUS,
    OPTIONS,
    PLAN,
    START,
    by_host,
    facts,
    inspected,
    submit,
)  # fmt: skip
from tests.unit.ddpctl.test_ssh import GONE, LOST_HOST, lost, shows

from ddpctl.command import Command, Output, shell_line
from ddpctl.errors import ConfigError, UnavailableError
from ddpctl.targets.ssh.project import sync
from ddpctl.targets.ssh.target import SshTarget


def test_root_gives_the_folder_to_the_images_user() -> None:
    commands, _ = submit(*(facts(number, id="0:0", home="/root") for number in (1, 2)))
    text = matching(commands, START)[0].stdin or ""
    assert 'chown -R 10001:10001 "$HOME"/.ddpctl/runs/night && chown 10001:10001 /root/.ddpctl/' in text
    assert "--user=10001:10001 " in text


def test_a_dry_run_on_hosts_without_gpus_asks_for_none() -> None:
    commands: list[Command] = []
    with pytest.raises(ConfigError):
        perform(SshTarget(OPTIONS).dry_run(PLAN), {FACTS: by_host(facts(1, image=None), facts(2)), **ANSWERS}, commands)
    assert ["--gpus" in (start.stdin or "") for start in matching(commands, START)] == [False, False]


def test_a_dry_run_sends_the_whole_project() -> None:
    listed = {"files": {"a.py": "1"}, "sizes": {"a.py": 1}, "left_out": [], "rsync": True, "zstd": True}
    here = Output(returncode=0, stdout=json.dumps(listed))
    verb = sync([OPTIONS.hosts[0].host], cwd="/p", home="~/.ddpctl", run="night", run_dir="/s/night")
    commands, lines = next(verb), []
    with suppress(StopIteration):
        while True:
            lines += [shell_line(command) for command in commands]
            commands = verb.send(
                tuple(here if request.probe else replace(OK, stdout=request.placeholder) for request in commands)
            )
    (sent,) = [line for line in lines if "tar --extract" in line]
    assert sent.startswith("ssh -- box1 ")
    assert sent.endswith(" </s/night/project.tar.0")


def test_a_dry_run_shows_its_commands_although_a_host_is_not_ready() -> None:
    commands: list[Command] = []
    hosts = by_host(facts(1, gpu=GPUS), Output(returncode=255, stderr="no route\n"))
    with pytest.raises(UnavailableError) as error:
        perform(SshTarget(OPTIONS).dry_run(PLAN), {FACTS: hosts, **ANSWERS}, commands)
    assert "1 of 2" in str(error.value).splitlines()[0]
    first, second = matching(commands, START)
    assert '--gpus="device=GPU-0,GPU-1"' in (first.stdin or "")
    line = next(line for line in (second.stdin or "").splitlines() if line.startswith("docker run"))
    assert "'--user=<uid>:<gid>'" in line
    assert "'--volume=<home>/.ddpctl/runs/night:/runs/night'" in line
    assert """'--gpus="device=<GPU 0>,<GPU 1>"'""" in line
    assert "'sha256:<image>'" in line


MORE_REFUSALS = [
    (
        "engine",
        {"engine": None, "image": None, "engine_error": "Cannot connect to the Docker daemon"},
        UnavailableError,
        "docker: Cannot connect to the Docker daemon",
    ),
    ("flock", {"flock": None}, UnavailableError, "util-linux"),
    (
        "claims",
        {"gpu": GPUS, "claims_error": "another launch is starting a run there"},
        UnavailableError,
        "another launch is starting a run there",
    ),
    ("other-image", {"image": inspected("sha256:bb")}, ConfigError, "sha256:bb"),
    (
        "nvidia-smi",
        {"gpu_error": "exit code 15: GPU is lost", "gpu": GPUS},
        UnavailableError,
        "exit code 15: GPU is lost",
    ),
    ("nvidia-runtime", {"gpu": GPUS, "runtimes": "{}"}, UnavailableError, "nvidia-container-toolkit"),
    ("writable", {"writable": None}, UnavailableError, "~/.ddpctl"),
    (
        "claim",
        {"gpu": GPUS, "claim": f"old 0 970 none {GPUS[0]} {GPUS[2]}", "now": "1000"},
        UnavailableError,
        "run 'old' has been using 2 GPUs for 30 s",
    ),
    ("too-few-gpus", {"gpu": GPUS[:1]}, ConfigError, "1 GPU, not 2"),
]


@pytest.mark.parametrize(
    ("changes", "kind", "cause"),
    [pytest.param(*row, id=name) for name, *row in MORE_REFUSALS],
)
def test_a_host_that_is_not_ready_is_refused(changes, kind, cause):
    test_ssh.test_a_host_that_is_not_ready_is_refused(changes, kind, cause)


@pytest.mark.parametrize(
    ("first", "second", "state", "code", "facts"),
    [
        pytest.param(
            shows(True, "training"), GONE, "running", None, f"box2 (node 1) {LOST_HOST}", id="running-and-gone"
        ),
        pytest.param(
            shows(True, "training", steps="1.0,5\n2.0,"),
            shows(True, "training"),
            "running",
            None,
            "2 of 2",
            id="restarted",
        ),
        pytest.param(lost(1), GONE, "failed", 137, f"node 1 was lost; box2 (node 1) {LOST_HOST}", id="node-1-gone"),
    ],
)
def test_the_status_of_a_run_follows_from_what_its_hosts_show(first, second, state, code, facts):
    test_ssh.test_the_status_of_a_run_follows_from_what_its_hosts_show(first, second, state, code, facts)
