"""ddptrain with a pause at each step, so that it leaves the cores to others.

If $SLOW is set, the pause is 0.1 s, and 0.3 s on rank 3 while the file $SLOW exists. Otherwise, it is 0.03 s.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from ddptrain.data.loader import BatchBuilder

batch = BatchBuilder.batch
slow = os.environ.get("SLOW")


def paced(*args, **options):
    is_slow = slow and os.environ["RANK"] == "3" and Path(slow).exists()
    time.sleep(0.3 if is_slow else 0.1 if slow else 0.03)
    return batch(*args, **options)


BatchBuilder.batch = paced
sys.argv[0] = "ddptrain"
runpy.run_module("ddptrain", run_name="__main__")
