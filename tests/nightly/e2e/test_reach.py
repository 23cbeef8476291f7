"""attach, exec and shell on a real run of this machine."""

import json
import os
import re
import signal
from pathlib import Path

from tests.e2e.driver import SCRIPTS, ddpctl, events_of, start, wait_until


def test_exec_and_attach_reach_a_run_that_continues(tmp_path: Path) -> None:
    assert ddpctl("launch", "-d", "--nodes", "2", "--name", "night", "--", str(SCRIPTS / "idle.py")).returncode == 0
    wait_until(lambda: all(events_of(tmp_path, "night", "ranks_started", node) for node in (0, 1)), "the ranks")
    done = ddpctl("exec", "night", "--node", "1", "--", "sh", "-c", "echo $DDP_RUN_ID $PET_NODE_RANK; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "night 1\n", "")
    wrong = ddpctl("exec", "night", "--node", "2", "--", "true")
    assert (wrong.returncode, "--node 2" in wrong.stderr, "0 to 1" in wrong.stderr) == (66, True, True)
    shell = ddpctl("shell", "night")
    assert (shell.returncode, "ddpctl exec" in shell.stderr) == (2, True)
    attached = start("attach", "night")
    assert attached.stdout is not None
    assert re.match(r"\[node[01]\] ", attached.stdout.readline())
    os.killpg(attached.pid, signal.SIGINT)
    output, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, output
    status = json.loads(ddpctl("status", "night", "--json").stdout)
    assert (status["state"], status["code"]) == ("stopped", 130)
    assert re.search(r"^run 'night' stopped\b.*\b130\b", output, re.M)
    ended = ddpctl("attach", "night")
    assert (ended.returncode, "'night'" in ended.stderr, "stopped" in ended.stderr) == (66, True, True)
