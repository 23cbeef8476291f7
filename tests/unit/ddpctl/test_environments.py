"""Environments from a lock: what their key depends on, which locks are refused, and what a host is sent."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.messages import assert_names

from ddpctl import targets
from ddpctl.command import UNREACHED, Host, Output
from ddpctl.errors import ConfigError, FileError
from ddpctl.files import environments
from ddpctl.files.environments import Recipe, read_lock
from ddpctl.job import config
from ddpctl.targets.ssh.options import SshHost, SshOptions

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
    lock(tmp_path, "3.13\n", ".python-version")
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
        pytest.param(
            "slurm", "requirements.txt", "torch==2.10.0", "    runtime: pyxis\n", "4:18", ("pyxis",), id="pyxis"
        ),
        pytest.param("ssh", "requirements.txt", "numpy==2.0", BARE, "4:18", ("torch",), id="no-torch"),
        pytest.param("ssh", "requirements.txt", "torch==2\xff", BARE, "4:18", ("requirements.txt",), id="not-utf-8"),
        pytest.param("ssh", "uv.lock", UV_LOCK, BARE, "4:18", ("pyproject.toml",), id="no-pyproject"),
        pytest.param("ssh", "conda.yaml", "torch", BARE, "4:18", ("uv.lock",), id="another-name"),
        pytest.param("ssh", "requirements.txt", None, BARE, "4:18", ("requirements.txt",), id="missing"),
        pytest.param(
            "ssh",
            "requirements.txt",
            "torch==2",
            f"{BARE}    python: ~/venv/bin/python\n",
            "7:13",
            ("python",),
            id="python",
        ),
        pytest.param(
            "ssh", "requirements.txt", "torch==2", f"{BARE}    wheelhouse: .\n", "4:18", ("wheels",), id="no-wheels"
        ),
        pytest.param("kubernetes", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="kubernetes"),
        pytest.param("kaggle", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="kaggle"),
        pytest.param("local", "uv.lock", None, "", "4:5", ("ssh", "slurm"), id="local"),
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
        packs = argv[:4] == environments._PROGRAM
        seen.append(" ".join(argv[6:]) if packs else "fetch" if "download" in " ".join(argv) else commands[0].mode)
        assert {command.host for command in commands} <= {None, hosts[0]}
        outputs = [Output(returncode=code if commands[0].mode == "stream" else 0, stdout='["a.tar", 7]')]


def test_a_host_gets_only_the_files_that_it_lacks(tmp_path: Path) -> None:
    recipe = read_lock(lock(tmp_path), None, b"wheel")
    ((own, size),) = recipe.sizes.items()
    assert made(recipe, f"x86_64 uv\n{size} {own}\n") == ["stream"]
    assert made(recipe, f"x86_64 uv\n{size - 1} {own}\n") == [own, "capture", "capture", "stream"]
    assert made(recipe, f"aarch64 none\n{size} {own}\n") == ["fetch", "uv-aarch64", "capture", "capture", "stream"]


def test_a_lock_that_uv_refuses_is_a_config_error(tmp_path: Path) -> None:
    recipe = read_lock(lock(tmp_path), None, b"wheel")
    assert made(recipe, "x86_64 uv\n", code=69)
    with pytest.raises(ConfigError) as error:
        made(recipe, "x86_64 uv\n", code=78)
    assert_names(error.value, recipe.lock)
