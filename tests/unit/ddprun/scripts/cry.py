"""Rank N of ``cry.py N`` fails, and its peers lose it; with ``talk`` they talk on after its last word."""

import os
import sys
import time
from pathlib import Path

rank, guilty, talk = int(os.environ["RANK"]), int(sys.argv[1]), len(sys.argv) > 2
here = Path(os.environ["DDP_RUN_DIR"])
print("ready", flush=True)
if rank == guilty and not talk:
    (here / "failed").touch()
    raise ValueError("bad label 17")
if rank == guilty:
    print("no picture in /data", flush=True)
    (here / "failed").touch()
    while not (here / "talked").exists():
        time.sleep(0.05)
    sys.exit(3)
while not (here / "failed").exists():
    time.sleep(0.05)
if talk:
    time.sleep(0.5)
    print("\n".join(f"line {number}" for number in range(40)), flush=True)
    time.sleep(0.5)
    (here / "talked").touch()
    time.sleep(600)
time.sleep(0.3)
raise RuntimeError("gloo/pair.cc: the connection is closed")
