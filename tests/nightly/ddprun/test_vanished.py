"""A node 0 that falls silent, and closes no connection, before the others train: every call to its store just waits."""

import signal
import time

import pytest

from ddpwire.run_files import Outcome


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_while_a_third_node_is_waited_for(runs, wait_s):
    port, options = runs.free_port(), ("--join-timeout", "120")
    first = runs.start("act.py", nodes="3", port=port, options=options)
    second = runs.start("act.py", node=1, nodes="3", port=port, options=options)
    runs.until(lambda: (second.folder / "node.json").exists() and second.state().master)
    time.sleep(wait_s)
    first.process.send_signal(signal.SIGSTOP)
    assert second.end() == 137
    assert second.facts() == Outcome(code=137, cause="node_lost", message="", node=0, retry=True)
    first.process.kill()
