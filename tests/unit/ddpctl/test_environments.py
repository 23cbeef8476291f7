"""Environments from a lock: what their key depends on, which locks are refused, and what a host is sent."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.messages import assert_names
from tests.unit.ddpctl.answers import Answer, matching, only, perform
from tests.unit.ddpctl.ssh_answers import ANSWERS, FACTS, HOSTS, PLAN, START, facts

from ddpctl import targets
from ddpctl.command import UNREACHED, Command, Host, Output
from ddpctl.errors import ConfigError, FileError, UnavailableError
from ddpctl.files import environments
from ddpctl.files.environments import Recipe, read_lock
from ddpctl.job import config
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget
from ddpctl.targets.ssh.options import SshHost, SshOptions
from ddpctl.targets.ssh.target import SshTarget

UV_LOCK = 'version = 1\nrequires-python = ">=3.12"\n\n[[package]]\nname = "torch"\nversion = "2.10.0"\n'
OPTIONS = SshOptions(hosts=(SshHost(address="box1"),), runtime="none")


def lock(folder: Path, text: str = "torch==2.10.0\n", name: str = "requirements.txt") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def key(recipe: Recipe) -> str:
    return str(recipe.resolve(OPTIONS, "~/e").python)


def test_the_python_of_an_environment_depends_on_the_lock_its_python_ddpctl_and_the_wheels(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    lock(wheels, "", "torch-2.10.0-py3-none-any.whl")
    recipes = [
        read_lock(lock(tmp_path), None, b"wheel"),
        read_lock(lock(tmp_path), wheels, b"wheel"),
        read_lock(lock(tmp_path), None, b"another wheel"),
        read_lock(lock(tmp_path, "torch==2.10.1\n"), None, b"wheel"),
    ]
    lock(tmp_path, "", "pyproject.toml")
    recipes.append(read_lock(lock(tmp_path, UV_LOCK, "uv.lock"), None, b"wheel"))
    lock(tmp_path, "3.13\n3.12\n", ".python-version")
    recipes.append(read_lock(lock(tmp_path, UV_LOCK, "uv.lock"), None, b"wheel"))
    assert len({*map(key, recipes)}) == len(recipes)
    assert [recipe.requires for recipe in recipes[3:]] == [">=3.11", ">=3.12", "3.13"]
    assert key(recipes[-1]) == key(read_lock(tmp_path / "uv.lock", None, b"wheel"))


TARGET = "targets:\n  there:\n    kind: {kind}\n    environment: {lock}\n{more}"
SSH = "    hosts: [box1]\n"
BARE = f"{SSH}    runtime: none\n"


@pytest.mark.parametrize(
    ("kind", "name", "text", "more", "place", "facts"),
    [
        pytest.param("ssh", "requirements.txt", "torch==2.10.0", SSH, "4:18", ("docker", "none"), id="container"),
        pytest.param("ssh", "requirements.txt", "numpy==2.0", BARE, "4:18", ("torch",), id="no-torch"),
        pytest.param("ssh", "requirements.txt", None, BARE, "4:18", ("requirements.txt",), id="missing"),
        pytest.param("kubernetes", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="kubernetes"),
    ],
)
def test_an_environment_that_cannot_be_made_is_an_error_at_its_key(
    kind: str, name: str, text: str | None, more: str, place: str, facts: tuple[str, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("latin-1"))
    file = tmp_path / "ddpctl.yaml"
    file.write_text(TARGET.format(kind=kind, lock=name, more=more))
    with pytest.raises(FileError) as error:
        config.load(file=file, kinds=targets.kinds(), target="there")
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{file}:{place}: ")
    assert_names(line, *facts)


def test_options_of_an_earlier_launch_have_the_python_of_their_environment(tmp_path: Path) -> None:
    options = replace(OPTIONS, environment=str(lock(tmp_path)))
    options = read_lock(tmp_path / "requirements.txt", None).resolve(options, "~/.ddpctl/environments")
    assert [*environments.problems(options, python="python3")] == []


# The commands of make


def made(recipe: Recipe, survey: str, *, code: int = 0) -> list[str]:
    """Return what is run for two hosts, the second of which does not answer: each program, or what is packed."""

    hosts = [Host(address="box1"), Host(address="box2")]
    verb = environments.make(hosts, "~/e/0123456789abcdef/python", recipe)
    next(verb)
    outputs: Sequence[Output] = (Output(returncode=0, stdout=survey), Output(returncode=UNREACHED, stderr="lost"))
    seen = []
    while True:
        try:
            commands = verb.send(tuple(outputs))
        except StopIteration:
            return seen
        argv = commands[0].argv
        names = commands[0].call.args[1] if commands[0].call else ()
        seen.append(" ".join(names) if names else "fetch" if "download" in " ".join(argv) else commands[0].mode)
        assert {command.host for command in commands} <= {None, hosts[0]}
        outputs = [Output(returncode=code if commands[0].mode == "stream" else 0, value=("a.tar", 7))]


def test_a_host_gets_only_the_files_that_it_lacks(tmp_path: Path) -> None:
    recipe = read_lock(lock(tmp_path), None, b"wheel")
    ((own, size),) = recipe.sizes.items()
    assert made(recipe, f"machine x86_64 uv\n{size} {own}\n") == ["stream"]
    assert made(recipe, f"machine x86_64 uv\n{size - 1} {own}\n") == [own, "capture", "capture", "stream"]
    assert made(recipe, f"machine aarch64 none\n{size} {own}\n") == [
        "fetch",
        "uv-aarch64",
        "capture",
        "capture",
        "stream",
    ]


def test_a_lock_that_uv_refuses_is_a_config_error(tmp_path: Path) -> None:
    recipe = read_lock(lock(tmp_path), None, b"wheel")
    assert made(recipe, "machine x86_64 uv\n", code=69)
    with pytest.raises(ConfigError) as error:
        made(recipe, "machine x86_64 uv\n", code=78)
    assert_names(error.value, recipe.lock)


# The launches

RECORD = {"lock": "requirements.txt 0123", "python": "3.11.2", "torch": "2.10.0", "packages": "16 (4567)"}
INSTALLS = "pip install"


def answers_of(recipe: Recipe, more: dict[str, Answer]) -> dict[str, Answer]:
    ((own, size),) = recipe.sizes.items()
    survey = Output(returncode=0, stdout=f"machine x86_64 uv\n{size} {own}\n")
    return {
        "environments._read": Output(returncode=0, value=recipe),
        "-printf": survey,
        **more,
    }


def test_an_ssh_launch_makes_the_environment_on_the_hosts_that_lack_it(tmp_path: Path) -> None:
    recipe, commands = read_lock(lock(tmp_path), None, b"wheel"), list[Command]()
    target = SshTarget(SshOptions(hosts=HOSTS, runtime="none", environment=recipe.lock))

    def look(command: Command) -> Output:
        if str(command.host) == "box2" and not matching(commands, INSTALLS):
            return facts(2, engine=None, engine_error="not found")
        return facts(environment=json.dumps(RECORD))

    answers = answers_of(recipe, {FACTS: look, **ANSWERS})
    _, options = perform(target.resolve(), answers)
    assert options.python == recipe.resolve(options, "~/.ddpctl/environments").python
    plan = replace(PLAN, job=replace(PLAN.job, device="cpu", mounts=()))
    _, submission = perform(target.submit(plan, attached=True), answers, commands)
    assert [str(command.host) for command in matching(commands, INSTALLS)] == ["box2"]
    assert [str(command.host) for command in commands if FACTS in (command.stdin or "")] == ["box1", "box2", "box2"]
    assert submission.handle["environment"] == RECORD
    assert all(options.python[2:] in (command.stdin or "") for command in matching(commands, START))


def test_a_host_without_its_environment_is_not_ready(tmp_path: Path) -> None:
    recipe = read_lock(lock(tmp_path), None, b"wheel")
    target = SshTarget(SshOptions(hosts=HOSTS, runtime="none", environment=recipe.lock))
    missing = facts(engine=None, engine_error="not found")
    answers = answers_of(recipe, {FACTS: missing, **ANSWERS})
    perform(target.resolve(), answers)
    with pytest.raises(UnavailableError) as error:
        perform(target.submit(PLAN, attached=True), answers)
    assert {check for wrong in error.value.fields["machines"].values() for check, _ in wrong} >= {"environment"}


@pytest.mark.parametrize("is_there", [False, True], ids=["missing", "there"])
def test_a_slurm_job_runs_in_the_environment_beside_its_runs(tmp_path: Path, is_there: bool) -> None:
    recipe, commands = read_lock(lock(tmp_path), None, b"wheel"), list[Command]()

    def record(_: Command) -> Output:
        return Output(returncode=0, stdout=json.dumps(RECORD) if is_there or matching(commands, INSTALLS) else "")

    sent = {"sys.prefix": record, "--parsable": Output(returncode=0, stdout="7\n")}
    target = SlurmTarget(SlurmOptions(environment=recipe.lock), {})
    _, submission = perform(target.submit(PLAN, attached=True), answers_of(recipe, sent), commands)
    assert len(matching(commands, INSTALLS)) == (not is_there)
    assert submission.handle["environment"] == RECORD
    python = recipe.resolve(SlurmOptions(), "/s/.environments").python
    assert f"exec {python} -P -m ddprun.batch" in str(only(commands, "/s/night/job.sh\n").stdin)
