"""Stops in a debugger on the rank that has an input, and reads a line; all ranks meet before and after."""

import os
import shutil
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
answer = 0
signal.signal(signal.SIGWINCH, lambda *_: print(f"now {os.get_terminal_size().columns} columns", flush=True))
is_debugged = dist.get_rank() == dist.get_world_size() - 1
if is_debugged:
    print(f"terminals {[os.isatty(number) for number in (0, 1, 2)]}, {shutil.get_terminal_size().columns} columns")
    breakpoint()  # noqa: T100
print("the answer is", answer)
if is_debugged:
    print("hello", input("name? "))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
