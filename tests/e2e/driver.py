"""Start ddpctl, ddprun and ranks as real processes, wait for them, and read what they have written."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.in_process import ddpctl as in_process

from ddprun.files.process_discovery import is_locked
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


def wait_until(condition: Callable[[], object], event: str, timeout_s: float = 240) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {event}"
        time.sleep(0.05)


def processes_of(run: str) -> dict[int, str]:
    """Return pid → command line of each live process of this test's run: it has its name as variable or argument."""
    processes = {}
    here = f"DDPCTL_STATE_DIR={os.environ['DDPCTL_STATE_DIR']}".encode()  # tests run side by side
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            argv, environ = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        ours = f"DDP_RUN_ID={run}".encode() in environ.split(b"\0") or run.encode() in argv.split(b"\0")
        if ours and here in environ.split(b"\0") and state != "Z" and int(folder.name) != os.getpid():
            processes[int(folder.name)] = argv.replace(b"\0", b" ").decode(errors="replace")
    return processes


def is_over(run: str) -> bool:
    """Return whether nothing of a run is left. A process that exits loses its environment before its node's lock."""
    folders = Path(os.environ["DDPCTL_STATE_DIR"], run).glob("node-*")
    return not any(is_locked(folder) for folder in folders) and not processes_of(run)


def node_log(tmp_path: Path, run: str, node: int = 0) -> str:
    path = tmp_path / "runs" / run / f"node-{node}" / NODE_LOG
    return path.read_text() if path.exists() else ""


def status_of(run: str) -> dict[str, Any]:
    return dict(json.loads(in_process("status", run, "--json").stdout))


def check_interrupted(logs: Iterable[str]) -> None:
    """Check what each rank of scripts/interrupted.py has written at one Ctrl-C: ranks 1 and 2 do not catch it."""
    for rank, log in enumerate(logs):
        caught = log == "ready\ninterrupted\nsaved\n"
        raised = log.startswith("ready\nTraceback ") and log.endswith("\nKeyboardInterrupt\n")
        assert (caught, raised) == (rank in (0, 3), rank in (1, 2)), log


def outcome_of(tmp_path: Path, run: str, node: int = 0) -> Outcome:
    return read_outcome((tmp_path / "runs" / run / f"node-{node}" / OUTCOME).read_text())


def events_of(tmp_path: Path, run: str, kind: str, node: int = 0) -> list[Event]:
    path = tmp_path / "runs" / run / f"node-{node}" / EVENTS
    return [event for event in read_events(path.read_text() if path.exists() else "") if event.event == kind]
