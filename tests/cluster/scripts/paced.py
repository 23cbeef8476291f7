"""ddptrain at 0.1 s a step, so that it leaves the cores to others. Rank 3 takes 0.3 s while the file $SLOW exists."""

import os
import runpy
import sys
import time
from pathlib import Path

from ddptrain.data.augment import BatchBuilder

batch = BatchBuilder.batch
slow = Path(os.environ["SLOW"]) if "SLOW" in os.environ and os.environ["RANK"] == "3" else None


def paced(*args, **options):
    time.sleep(0.3 if slow and slow.exists() else 0.1)
    return batch(*args, **options)


BatchBuilder.batch = paced
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
