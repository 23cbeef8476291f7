"""attach, exec and shell on a real run of this machine."""

import os
import re
import signal
from pathlib import Path

from tests.road.driver import SCRIPTS, ddpctl, node_log, start, wait_until


def test_exec_and_attach(tmp_path: Path) -> None:
    """What docs/ssh.md shows; the second Ctrl-C is tried in test_signals.py and tests/cluster/test_ssh.py."""
    assert ddpctl("launch", "-d", "--nodes", "2", "--name", "night", "--", str(SCRIPTS / "idle.py")).returncode == 0
    wait_until(lambda: "started (attempt 1)" in node_log(tmp_path, "night", 1), "the ranks")
    done = ddpctl("exec", "night", "--node", "1", "--", "sh", "-c", "echo $DDP_RUN_ID $PET_NODE_RANK; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "night 1\n", "")
    wrong = ddpctl("exec", "night", "--node", "2", "--", "true")
    assert (wrong.returncode, wrong.stderr) == (66, "ddpctl: --node 2: the nodes of night are 0 to 1\n")
    shell = ddpctl("shell", "night")
    assert (shell.returncode, shell.stderr) == (
        2,
        "ddpctl: shell: no terminal here; ddpctl exec RUN -- COMMAND runs a command without one\n",
    )
    attached = start("attach", "night")
    assert attached.stdout is not None
    assert re.match(r"\[node[01]\] ", attached.stdout.readline())
    os.killpg(attached.pid, signal.SIGINT)
    said, _ = attached.communicate(timeout=60)
    assert attached.returncode == 130, said
    assert "run night stopped, exit code 143" in said
    ended = ddpctl("attach", "night")
    assert (ended.returncode, ended.stderr) == (
        66,
        "ddpctl: night has ended (stopped): ddpctl status night and ddpctl logs night\n",
    )
