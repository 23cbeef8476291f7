"""attach, exec and shell on a real run of this machine."""

import json
import os
import re
import signal
from pathlib import Path

from tests.e2e.driver import SCRIPTS, ddpctl, end_of, events_of, start, wait_until
from tests.wording import Wording


def test_exec_and_attach(tmp_path: Path, wording: Wording) -> None:
    """What docs/ssh.md shows; the second Ctrl-C is tried in test_signals.py and tests/cluster/test_ssh.py."""
    assert ddpctl("launch", "-d", "--nodes", "2", "--name", "night", "--", str(SCRIPTS / "idle.py")).returncode == 0
    wait_until(lambda: all(events_of(tmp_path, "night", "ranks_started", node) for node in (0, 1)), "the ranks")
    done = ddpctl("exec", "night", "--node", "1", "--", "sh", "-c", "echo $DDP_RUN_ID $PET_NODE_RANK; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "night 1\n", "")
    wrong = ddpctl("exec", "night", "--node", "2", "--", "true")
    assert wrong.returncode == 66
    wording(wrong.stderr)
    shell = ddpctl("shell", "night")
    assert shell.returncode == 2
    wording(shell.stderr)
    attached = start("attach", "night")
    assert attached.stdout is not None
    assert re.match(r"\[node[01]\] ", attached.stdout.readline())
    os.killpg(attached.pid, signal.SIGINT)
    said, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, said
    status = json.loads(ddpctl("status", "night", "--json").stdout)
    assert (status["state"], status["code"]) == ("stopped", 130)
    wording(end_of("night", said))
    ended = ddpctl("attach", "night")
    assert ended.returncode == 66
    wording(ended.stderr)
