"""A rank that says which cores it, and a thread that it starts, may run on."""

import os
import threading

print(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=lambda: print(sorted(os.sched_getaffinity(0))))
thread.start()
thread.join()
