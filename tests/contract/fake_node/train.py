"""A training for the real ddprun that does what the fake node does with the same arguments."""

import os
import sys
import time
from pathlib import Path

import ddpwire.script as ddp

if "wait" in sys.argv:
    ddp.should_stop()  # from here on, a signal does not end the rank at once
for word in sys.argv[1:]:
    name, _, value = word.partition("=")
    if name == "steps":
        for step in range(1, int(value) + 1):
            print(f"step {step}", flush=True)
            ddp.progress(step, total=int(value))
    if name == "wait":
        while not ddp.should_stop():
            time.sleep(0.01)
        ddp.stop()
    if name == "exit":
        code, _, rank = value.partition("@")
        if os.environ["RANK"] == rank:
            other = Path(os.environ["DDP_RUN_DIR"], "node-0/rank-0.log")
            while "step 2" not in other.read_text():  # it would be killed before it has reported a step
                time.sleep(0.01)
            sys.exit(int(code))
