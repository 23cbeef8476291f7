"""Whoever says when a run is ended from outside, its ranks are asked in time to save."""

import subprocess
import sys

ASKED_TWICE = """
import os, signal, time
from ddprun.ranks.termination import Signals
heard = []
signals = Signals(heard.append, print)
signals.listen()
os.kill(os.getpid(), signal.SIGTERM)
while not heard:
    time.sleep(0.01)
signals.stop("")  # the deadline, or the launcher's end
time.sleep(0.3)
print(len(heard))
os.kill(os.getpid(), signal.SIGTERM)  # a person, who means it
while len(heard) < 2:
    time.sleep(0.01)
print([int(number) for number in heard])
"""


def test_a_deadline_takes_no_grace_from_ranks_that_were_asked_already() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("1\n[15, 15]\n", "")
