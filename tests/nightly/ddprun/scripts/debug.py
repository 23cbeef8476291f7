"""Stops in a debugger on the rank that has an input, and reads a line; all ranks meet before and after."""

import os
import shutil
import signal
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
answer = 0

# input() runs a signal's Python handler only if the signal comes during its select(). A thread is told at any moment.
wakeup, wakeup_end = os.pipe()
os.set_blocking(wakeup_end, False)
signal.set_wakeup_fd(wakeup_end)
signal.signal(signal.SIGWINCH, lambda *_: None)


def print_columns() -> None:
    while os.read(wakeup, 1):
        print(f"now {os.get_terminal_size().columns} columns", flush=True)


threading.Thread(target=print_columns, daemon=True).start()
is_debugged = dist.get_rank() == dist.get_world_size() - 1
if is_debugged:
    print(f"terminals {[os.isatty(number) for number in (0, 1, 2)]}, {shutil.get_terminal_size().columns} columns")
    breakpoint()  # noqa: T100
print("the answer is", answer)
if is_debugged:
    print("hello", input("name? "))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
