"""A person's loop, as a process. Each word of the command line adds something to it."""

import ddpwire.script as ddp  # isort: skip

import atexit
import os
import sys
import time

options = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
atexit.register(lambda: print("atexit ran"))
if "ranks" in options:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
if "fork" in options:
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(7)
    os.kill(pid, 15)
    print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
if "import" in options:
    print("importing", flush=True)
    time.sleep(30)
step = 0
try:
    while step < 4000:
        step += 1
        if "ranks" in options:
            dist.all_reduce(torch.ones(1))
        time.sleep(0.002 * (1 + rank))
        ddp.progress(step, total=int(os.environ.get("TOTAL", "4000")), samples=8, loss=0.5, epoch=1)
        if ddp.should_stop():
            print("stopped at", step)
            ddp.stop()
        if step == 5:
            print("training", flush=True)
        if step == 20 and "short" in options:
            break
finally:
    print("finally ran")
ddp.heartbeat()
