"""Waits for a KeyboardInterrupt, which ranks 1 and 2 do not catch."""

import os
import time

print("ready", flush=True)
try:
    time.sleep(300)
except KeyboardInterrupt:
    if os.environ["RANK"] in "12":
        raise
    print("interrupted", flush=True)
    time.sleep(2)  # a second SIGINT would be seen here
    print("saved", flush=True)
