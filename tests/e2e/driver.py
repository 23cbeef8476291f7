"""Drives the whole road: ddpctl, ddprun and ranks as real processes, and who of them is alive."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ddpwire.events import EVENTS, Event, read_events
from ddpwire.run_files import NODE_LOG, OUTCOME, Outcome, read_outcome

DDPCTL = (sys.executable, "-P", "-m", "ddpctl")  # as the console script: the current folder is no library
SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parent.parent.parent
PACED = ROOT / "tests/cluster/scripts/paced.py"  # ddptrain for tests in which a training has only to continue


def ddpctl(*args: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DDPCTL, *args], capture_output=True, text=True, timeout=timeout, cwd=cwd)


def start(*args: str) -> subprocess.Popen[str]:
    """An attached ddpctl in a session of its own, as a terminal would have it."""
    return subprocess.Popen(
        [*DDPCTL, *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_until(true: Callable[[], object], what: str, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def processes_of(run: str) -> dict[int, str]:
    """pid → command line of everything alive of this test's run: its name in its environment or its arguments."""
    found = {}
    here = f"DDPCTL_STATE_DIR={os.environ['DDPCTL_STATE_DIR']}".encode()  # tests run side by side
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        ours = f"DDP_RUN_ID={run}".encode() in environ.split(b"\0") or run.encode() in argv.split(b"\0")
        if ours and here in environ.split(b"\0") and state != "Z" and int(folder.name) != os.getpid():
            found[int(folder.name)] = argv.replace(b"\0", b" ").decode(errors="replace")
    return found


def node_log(tmp_path: Path, run: str, node: int = 0) -> str:
    path = tmp_path / "runs" / run / f"node-{node}" / NODE_LOG
    return path.read_text() if path.exists() else ""


def outcome_of(tmp_path: Path, run: str, node: int = 0) -> Outcome:
    return read_outcome((tmp_path / "runs" / run / f"node-{node}" / OUTCOME).read_text())


def events_of(tmp_path: Path, run: str, kind: str, node: int = 0) -> list[Event]:
    path = tmp_path / "runs" / run / f"node-{node}" / EVENTS
    return [event for event in read_events(path.read_text() if path.exists() else "") if event.event == kind]


def end_of(run: str, output: str) -> str:
    """The line that says how a run ended, without its duration and which rank it was."""
    *_, line = (line for line in output.splitlines() if line.startswith(f"run '{run}' "))
    return re.sub(
        r"rank \d on node \d", "rank {rank} on node {node}", re.sub(r", after [0-9:.]+( s)?", ", after {time}", line)
    )
