"""The script that installs an environment on a host, run by a real shell.

``uv`` is a program of this test that makes a virtual environment with an empty distribution torch, because the real
one needs a network (tests/nightly/ssh/test_environments.py has it).
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.e2e.driver import wait_until
from tests.messages import assert_names

from ddpctl.command import Host
from ddpctl.files import environments
from ddpctl.files.environments import read_lock

UV = f"""\
#!/bin/sh
cd "$PWD" && echo "$*" >>"$UV_LOG"
case "$*" in
  "export --help") echo pylock.toml ;;
  "python find"*) echo {sys.executable} ;;
  "cache dir") echo "$HOME/cache" ;;
  "venv "*) for env; do :; done; exec {sys.executable} -m venv --without-pip "$env" ;;
  *"pip install"*--dry-run*) echo "Would download 1 package" ;;
  *"pip install"*"-r lock"*)
    while [ -e "$HOME/wait" ]; do touch "$HOME/waits"; sleep 0.1; done
    for site in "$4"/lib/python*/site-packages; do mkdir -p "$site/$TORCH-2.10.0.dist-info"; done
    printf 'Name: %s\\nVersion: 2.10.0\\n' "$TORCH" >"$site/$TORCH-2.10.0.dist-info/METADATA" ;;
esac
"""
Install = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/uv").write_text(UV)
    (tmp_path / "bin/uv").chmod(0o755)
    (tmp_path / "e/files").mkdir(parents=True)
    (tmp_path / "requirements.txt").write_text("torch==2.10.0\n")
    recipe = read_lock(tmp_path / "requirements.txt", None, b"wheel")

    def start(torch: str = "torch", num_bytes: int = 1) -> subprocess.Popen[bytes]:
        text = environments.install_text(Host(address="box1"), "~/e/key/python", replace(recipe, num_bytes=num_bytes))
        env = {
            "HOME": str(tmp_path),
            "PATH": f"{tmp_path}/bin:/usr/bin:/bin",
            "UV_LOG": str(tmp_path / "log"),
            "TORCH": torch,
        }
        with (tmp_path / "messages").open("ab") as file:
            return subprocess.Popen(["/bin/sh", "-c", text], env=env, stderr=file, start_new_session=True)

    return start


def record(tmp_path: Path) -> str:
    text = environments.record_text(environments.path_word("~/e/key/python"))
    argv, env = ["/bin/sh", "-c", text], {"HOME": str(tmp_path)}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20, check=False).stdout


def test_an_environment_is_complete_when_its_script_has_ended_and_is_made_once(
    tmp_path: Path, install: Install
) -> None:
    assert record(tmp_path) == ""
    assert install().wait(30) == 0
    first = record(tmp_path)
    assert environments.recorded(first)["environment"]["torch"] == "2.10.0"
    calls = (tmp_path / "log").read_text()
    assert install().wait(30) == 0
    assert "-r lock" not in (tmp_path / "log").read_text().removeprefix(calls)
    assert record(tmp_path) == first


def test_an_installation_that_was_killed_is_not_used_and_is_made_anew(tmp_path: Path, install: Install) -> None:
    (tmp_path / "wait").touch()
    process = install()
    wait_until((tmp_path / "waits").exists, "the installation", timeout_s=30)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    assert record(tmp_path) == ""
    (tmp_path / "wait").unlink()
    assert install().wait(30) == 0
    assert json.loads(record(tmp_path))["torch"] == "2.10.0"


def test_a_second_launch_waits_for_the_first(tmp_path: Path, install: Install) -> None:
    (tmp_path / "wait").touch()
    first = install()
    wait_until((tmp_path / "waits").exists, "the installation", timeout_s=30)
    calls = (tmp_path / "log").read_text()
    second = install()
    wait_until((tmp_path / "messages").read_text, "the message of the second launch", timeout_s=30)
    assert (tmp_path / "log").read_text() == calls
    (tmp_path / "wait").unlink()
    first.terminate()
    assert (first.wait(10), second.wait(30)) == (69, 0)
    assert record(tmp_path)


@pytest.mark.parametrize(
    ("torch", "num_bytes", "code", "facts"),
    [("jax", 1, 78, ("torch",)), ("torch", 1 << 60, 73, ((1 << 60) >> 20,))],
    ids=["no-torch", "full-disk"],
)
def test_an_environment_without_torch_or_disk_is_not_used(
    torch: str, num_bytes: int, code: int, facts: tuple[object, ...], tmp_path: Path, install: Install
) -> None:
    process = install(torch, num_bytes)
    assert (process.wait(30), record(tmp_path)) == (code, "")
    assert_names((tmp_path / "messages").read_text(), "box1", *facts)


def test_a_clean_up_keeps_the_environments_of_runs_and_the_newest(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"e/{number}/lock").mkdir(parents=True)
    (tmp_path / "runs/night").mkdir(parents=True)
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def sh(text: str) -> None:
        subprocess.run(["/bin/sh", "-c", text], env=env, check=True, timeout=20)

    for number, run in ((0, "night"), (1, "gone")):
        sh(environments.use_text(f"{tmp_path}/e/{number}/python", f"{tmp_path}/runs/{run}"))
    for number in range(7):  # number 7 is younger than an hour
        os.utime(tmp_path / f"e/{number}", (1e9 + number, 1e9 + number))
    sh(environments.clean_text("~/e"))
    assert {path.name for path in (tmp_path / "e").glob("?")} == {"0", "5", "6", "7"}
