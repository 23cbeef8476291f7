"""Regressions: each of these once left processes alive, reported a false state, or ran what it should not have."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.e2e.driver import DDPCTL, SCRIPTS, ddpctl, is_over, node_log, processes_of, start, wait_until
from tests.in_process import ddpctl as in_process

from ddpctl.errors import CannotWriteError
from ddpctl.job.launch_plan import title
from ddpctl.job.spec import JobSpec
from ddpctl.runs import run_store
from ddprun.files.process_discovery import is_locked
from ddprun.ranks.termination import stopped_before_start
from ddpwire.run_files import KILLED_ON_REQUEST

IDLE = str(SCRIPTS / "idle.py")
EXIT_WITH = Path(__file__).parent / "scripts/exit_with.py"


@pytest.fixture
def slow_python(tmp_path: Path) -> str:
    """A configuration whose Python takes two seconds to become a ddprun: a cold disk, a network file system."""
    wrapper = tmp_path / "slow-python"
    wrapper.write_text(f'#!/bin/bash\n[[ "$*" == *"ddprun --grace"* ]] && sleep 2\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    file = tmp_path / "slow.yaml"
    file.write_text(f"target: slow\ntargets: {{slow: {{kind: local, python: {wrapper}}}}}\n")
    return str(file)


def test_ctrl_c_during_a_detached_launch_ends_its_nodes(tmp_path: Path) -> None:
    process = start("launch", "--detach", "--nodes", "4", "--name", "early", "--", IDLE)
    wait_until(lambda: (tmp_path / "runs/early/node-1").exists() or process.poll() is not None, "the second node")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    if output.endswith("early\n"):  # it was quicker, and has said so: then the run is there, whole
        assert ddpctl("stop", "early", "--kill").returncode == 0
    else:
        assert process.returncode == 130, output
        assert not (tmp_path / "runs/early").exists()
    time.sleep(1)
    assert processes_of("early") == {}


def test_ctrl_c_reaches_a_ddprun_that_has_not_started(slow_python: str) -> None:
    """Its wrapper, a bash that waits for a program, would pass over SIGINT."""
    process = start("launch", "-f", slow_python, "--nodes", "2", "--name", "late", "--", IDLE)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("run 'late': "):
        assert process.poll() is None
    # Only from here on ddpctl stops the nodes itself; before, they end with their lifeline, when they have begun.
    wait_until(lambda: any("logs" in child.cmdline() for child in psutil.Process(process.pid).children()), "its log")
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert not [line for line in processes_of("late").values() if "ddprun" in line]
    wait_until(lambda: is_over("late"), "the end of sleep")


@pytest.mark.parametrize("how", [(), ("--kill",)], ids=["stop", "kill"])
def test_stop_reaches_a_ddprun_that_has_not_started(slow_python: str, how: tuple[str, ...]) -> None:
    assert ddpctl("launch", "-f", slow_python, "--detach", "--nodes", "2", "--name", "late", "--", IDLE).returncode == 0
    stopped = ddpctl("stop", "late", *how)
    assert stopped.returncode == 0
    killed, stopped_by_request = KILLED_ON_REQUEST, stopped_before_start(signal.SIGTERM, 0)
    state = json.loads(ddpctl("status", "late", "--json").stdout)
    end = killed if how or state["code"] == killed.code else stopped_by_request  # asked: it came within its grace
    assert (state["state"], state["code"], state["outcome"]["message"]) == ("stopped", end.code, end.message)
    assert re.search(rf"^run 'late' stopped\b.*\b{end.code}\b", stopped.stderr, re.M), stopped.stderr
    time.sleep(2.5)
    assert processes_of("late") == {}


def test_a_slow_start_is_waited_for(slow_python: str) -> None:
    done = ddpctl("launch", "-f", slow_python, "--name", "late", "--", str(EXIT_WITH), "0", "5")
    assert done.returncode == 5, done.stderr


def test_a_log_that_cannot_be_printed_does_not_change_how_the_run_ends() -> None:
    command = shlex.join([*DDPCTL, "launch", "--name", "cut", "--", str(EXIT_WITH), "0", "5"])
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(shlex.split(command), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 5, done.stderr
    assert len([line for line in done.stderr.splitlines() if "No space left on device" in line]) == 1
    assert "Traceback" not in done.stderr


def test_a_log_follower_ends_with_its_ddpctl(tmp_path: Path) -> None:
    ddpctl("launch", "--detach", "--name", "apart", "--", IDLE)
    following = start("logs", "-f", "apart")
    wait_until(lambda: any("logs" in line for line in processes_of("apart").values()), "the follower")
    following.send_signal(signal.SIGKILL)
    following.communicate(timeout=20)
    wait_until(lambda: not any(" logs " in line for line in processes_of("apart").values()), "its end", timeout_s=5)
    assert ddpctl("stop", "apart", "--kill").returncode == 0


def test_stop_kill_ends_what_a_killed_ddprun_has_left(tmp_path: Path) -> None:
    """The limit that docs/decisions/0002 names: ddprun and keeper are killed at once, a setsid'ed child is left."""
    ddpctl("launch", "--detach", "--name", "stray", "--", IDLE)
    wait_until(lambda: "idles" in node_log(tmp_path, "stray"), "the rank")
    for pid in [pid for pid, line in processes_of("stray").items() if "ddprun" in line]:
        os.kill(pid, signal.SIGKILL)
    node_dir = tmp_path / "runs/stray/node-0"
    wait_until(lambda: len(processes_of("stray")) <= 1 and not is_locked(node_dir), "the rank's end")
    state = json.loads(ddpctl("status", "stray", "--json").stdout)
    assert (state["state"], state["code"]) == ("lost", 137)
    assert ddpctl("stop", "stray", "--kill").returncode == 0
    assert processes_of("stray") == {}


def test_resuming_a_run_that_continues_is_refused(tmp_path: Path) -> None:
    ddpctl("launch", "--detach", "--name", "goes", "--", IDLE)
    done = ddpctl("launch", "--resume", "goes")
    ddpctl("stop", "goes", "--kill")
    assert done.returncode == 2
    assert [fact for fact in ("--resume", "'goes'") if fact not in done.stderr] == []
    assert len(list((tmp_path / "runs").glob("goes*"))) == 1


ODD: tuple[dict[str, object], ...] = (
    {"created": "yesterday"},
    {"job": {"nodes": "all"}},
    {"options": None},
    {"job": {"command": [1, 2]}},
    {"target": 7},
    {"kind": "slurm", "created": 1.0},  # long ago: it is not starting any more
    {"name": 5},
)


def test_a_corrupt_record_does_not_hide_other_runs(tmp_path: Path) -> None:
    assert ddpctl("launch", "--name", "good", "--", str(SCRIPTS / "ends.py")).returncode == 0
    record = json.loads((tmp_path / "runs/good/run.json").read_text())
    (tmp_path / "runs/odd").mkdir()
    for change in ODD:
        (tmp_path / "runs/odd/run.json").write_text(json.dumps(record | change))
        readable = change.keys() & {"kind", "name"}  # of another target, of the name of its folder
        listed = in_process("ps")
        assert listed.returncode == 0
        assert [line.split()[:2] for line in listed.stdout.splitlines()[1:] if line.startswith("good")] == [
            ["good", "succeeded"]
        ]
        assert in_process("status", "good").returncode == 0
        assert in_process("stop", "--all").returncode == 0
        assert ("'odd'" in listed.stderr) == (not readable)


def test_a_renamed_run_folder_is_a_run_of_that_name(tmp_path: Path) -> None:
    assert ddpctl("launch", "--name", "one", "--", str(SCRIPTS / "ends.py")).returncode == 0
    (tmp_path / "runs/one").rename(tmp_path / "runs/two")
    state = json.loads(ddpctl("status", "two", "--json").stdout)
    assert (state["run"], state["state"]) == ("two", "succeeded")


def test_a_scripts_name_is_not_executed_by_the_rendered_script(tmp_path: Path) -> None:
    name = "a.py\ntouch pwned\n#"
    (tmp_path / name).write_text("")
    script = ddpctl("render", "--", name, cwd=tmp_path).stdout
    subprocess.run(["/bin/bash", "-n", "-c", script], check=True)
    assert [line for line in script.splitlines() if line.startswith("touch")] == ["touch pwned"]  # inside quotes
    assert script.splitlines()[1].startswith("# 1 node x 1 rank of a.py\\ntouch pwned\\n# on this machine")
    assert title(JobSpec(command=("\x1b[31m.py",))) == "1 node x 1 rank of \\x1b[31m.py"


def test_a_projects_queue_module_does_not_replace_pythons(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong queue')\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("print('trained')\n")
    done = ddpctl("launch", "--name", "mine", "--", "src/train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained\n" in done.stdout


def test_a_missing_home_and_a_removed_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotWriteError) as error:
        run_store.state_dir({})
    assert (error.value.code, "HOME" in str(error.value), "DDPCTL_STATE_DIR" in str(error.value)) == (73, True, True)
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone} && rmdir {gone} && exec {shlex.join(DDPCTL)} launch"
    done = subprocess.run(["/bin/bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert (done.returncode, len(done.stderr.splitlines()), "Traceback" in done.stderr) == (66, 1, False)
