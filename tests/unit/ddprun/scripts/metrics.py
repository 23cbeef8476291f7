"""A rank that counts with prometheus_client, and forgets nothing when it is started again."""

import os
import signal
import time
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

Counter("ddp_steps_total", "Optimizer steps taken.").inc(10)
Histogram("my_seconds", "Of mine.", buckets=(1.0, 2.0)).observe(1.5)
gauge = Gauge("ddp_last_step", "The number of the last optimizer step.")
rank = int(os.environ["RANK"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    gauge.set(7)
    while rank == 1 and "ready" not in Path(os.environ["DDP_RUN_DIR"], "node-0", "rank-0.log").read_text():
        time.sleep(0.01)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
elif rank == 0:
    gauge.set(8)
print("ready")
time.sleep(60)
