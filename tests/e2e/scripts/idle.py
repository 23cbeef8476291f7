"""A rank that needs no torch: says that it is up and idles; with a child of its own, as a DataLoader would have."""

import os
import subprocess
import sys
import time

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} idles, child {child.pid}", flush=True)
time.sleep(600)
