"""Each verb in each state of a run on this machine, with real ddpruns: its exit code, and the state that it names.

The states: a launch that continues, one that was killed, a run before its ranks, one that trains, one that ends, and
runs that have succeeded, failed, been stopped, and been lost.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import ddpctl, is_over, processes_of, start, wait_until
from tests.in_process import ddpctl as in_process

SCRIPT = """
import pathlib, signal, sys, time
def stop(*_):
    pathlib.Path("stopping").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.02)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
pathlib.Path("ready").touch()
while sys.argv[1:] == ["wait"]:
    time.sleep(0.02)
sys.exit(3 * (sys.argv[1:] == ["fail"]))
"""
# As long as the file is there, the Python of the target does not come to its work: the launch's first look, or ddprun.
PYTHON = """#!/bin/bash
case "$*" in *find_spec*) held=launch ;; *"ddprun --grace"*) held=ddprun ;; esac
[[ -v held ]] && touch "at-$held" && while [[ -e "hold-$held" ]]; do sleep 0.05; done
exec {python} "$@"
"""
STATES = ("launching", "interrupted", "starting", "training", "stopping", "succeeded", "failed", "stopped", "lost")
SAID = {"launching": "starting", "interrupted": "lost", "training": "running"}  # the script reports no steps
# The exit code of each verb, in the order of the states.
CODES = {
    "status": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "ps": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "logs": (66, 66, 0, 0, 0, 0, 0, 0, 0),
    "exec": (69, 66, 0, 0, 0, 66, 66, 66, 66),
    "attach": (69, 66, None, None, None, 66, 66, 66, 66),  # None: it follows, and a SIGTERM ends it alone
    "resume": (2, 0, 2, 2, 2, 0, 0, 0, 0),  # launch --resume --dry-run
    "pull": (78, 78, 78, 78, 78, 78, 78, 78, 78),
    "timeline": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "report": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "top": (0, 0, 0, 0, 0, 0, 0, 0, 0),
    "rm": (2, 0, 2, 2, 2, 0, 0, 0, 0),  # --dry-run
    "stop": (0, 0, 0, 0, 0, 0, 0, 0, 0),  # then the run has ended, and nothing of it is left
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    (folder / "ddpctl.yaml").write_text(
        f"target: here\ntargets: {{here: {{kind: local, python: {python}}}}}\njob: {{device: cpu, grace: 600}}\n"
    )
    monkeypatch.chdir(folder)
    yield folder
    for name in ("hold-launch", "hold-ddprun"):
        (folder / name).unlink(missing_ok=True)
    (folder / "go").touch()


def bring_into(state: str, project: Path) -> subprocess.Popen[str] | None:
    """A run named night in that state; the launch, where that continues."""
    word = {"succeeded": "end", "failed": "fail"}.get(state, "wait")
    program = ("--name", "night", "--", "script.py", word)
    hold = {"launching": "launch", "interrupted": "launch", "starting": "ddprun"}.get(state)
    if hold:
        (project / f"hold-{hold}").touch()
    if hold == "launch":
        launch = start("launch", "--detach", *program)
        wait_until((project / "at-launch").exists, "the launch")
        if state == "interrupted":
            launch.send_signal(signal.SIGKILL)
            launch.communicate(timeout=60)
            (project / "hold-launch").unlink()
            wait_until(lambda: is_over("night"), "the end of what it had begun")
            return None
        return launch
    assert ddpctl("launch", "--detach", *program).returncode == 0
    if hold:
        wait_until((project / "at-ddprun").exists, "ddprun")
        return None
    wait_until((project / "ready").exists, "the rank")
    if state in ("succeeded", "failed"):
        ddpctl("attach", "night")
    elif state == "lost":
        (pid,) = [pid for pid, line in processes_of("night").items() if "ddprun --grace" in line][:1]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_over("night"), "the end of its ranks")
    elif state != "training":
        stop = start("stop", "night")
        wait_until((project / "stopping").exists, "the signal")
        if state == "stopping":
            stop.send_signal(signal.SIGINT)  # it is still stopping
        else:
            (project / "go").touch()
        stop.communicate(timeout=90)
    return None


def verb_of(verb: str) -> tuple[str, ...]:
    return {
        "exec": ("exec", "night", "--", "true"),
        "resume": ("launch", "--resume", "night", "--dry-run"),
        "top": ("top", "night", "--once"),
        "rm": ("rm", "night", "--dry-run"),
        "ps": ("ps",),
        "logs": ("logs", "night", "--tail", "5"),
    }.get(verb, (verb, "night"))


@pytest.mark.parametrize("state", STATES)
def test_every_verb_of_a_real_run_in_this_state(state: str, project: Path, tmp_path: Path) -> None:
    launch = bring_into(state, project)
    assert json.loads(in_process("status", "night", "--json").stdout)["state"] == SAID.get(state, state)
    answered = {}
    for verb, codes in CODES.items():
        if codes[STATES.index(state)] is None:
            attached = start(*verb_of(verb))
            wait_until(lambda pid=attached.pid: children_of(pid), "its log")  # type: ignore[misc]
            attached.send_signal(signal.SIGTERM)
            output, _ = attached.communicate(timeout=60)
            answered[verb] = None if attached.returncode == 143 else attached.returncode
        else:
            if verb == "stop":
                (project / "go").touch()
            done = in_process(*verb_of(verb))
            output, answered[verb] = done.stdout + done.stderr, done.returncode
        assert "Traceback" not in output, output
        assert "None" not in output, output
    assert answered == {verb: codes[STATES.index(state)] for verb, codes in CODES.items()}
    for name in ("hold-launch", "hold-ddprun"):
        (project / name).unlink(missing_ok=True)
    wait_until(lambda: is_over("night"), "its end")
    if launch:
        output, _ = launch.communicate(timeout=60)
        assert launch.returncode == 143, output
        assert not (tmp_path / "runs/night").exists()
        return
    ended = json.loads(in_process("status", "night", "--json").stdout)
    assert ended["state"] in ("succeeded", "failed", "stopped", "lost")
    if state in ("training", "stopping", "stopped"):
        assert (ended["state"], ended["code"]) == ("stopped", 143)
    assert in_process("rm", "night").returncode == 0
    assert not (tmp_path / "runs/night").exists()


def children_of(pid: int) -> list[str]:
    return [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
