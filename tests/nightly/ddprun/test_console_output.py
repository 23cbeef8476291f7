"""What one ddprun tells its ranks, and what it says of them: lines, messages, metrics, refusals."""

import fcntl
import time


def test_a_folder_that_is_still_being_left_is_waited_for(runs):
    """As where a scheduler starts a node again the instant its ddprun ends: the supervisor ends a little later."""
    folder = runs.run_dir / "node-0"
    folder.mkdir(parents=True)
    with (folder / "ddprun.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = runs.start("act.py", "all=0")
        time.sleep(1.5)
    assert second.end() == 0
