"""Ten causes, written by someone who had not seen ddpctl's code. Only the slow cases were changed: they now run
endlessly.
"""

import ctypes
import fcntl
import gc
import logging
import multiprocessing as mp
import os
import queue
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def flock_around_barrier() -> None:
    """One rank holds a file lock and waits in a barrier. The others wait for the lock. No rank is at fault."""
    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.02)
    cache = Path(tempfile.gettempdir(), f"cache-{os.environ['MASTER_PORT']}.pt")
    with cache.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank at a time builds/reads the cache
        if not cache.exists():
            torch.save(torch.arange(100), cache)
        data = torch.load(cache)
        dist.barrier()  # bug: inside the lock; the holder waits for ranks that wait for the lock
    dist.all_reduce(data.float())
    dist.destroy_process_group()


TOKENIZER_LOCK = threading.Lock()


def _tokenize_in_child(text: str) -> None:
    ctypes.CDLL(None).prctl(1, 9)  # die with the parent: only so that the test leaves nothing behind
    with TOKENIZER_LOCK:
        text.split()


def fork_child_lock() -> None:
    """Rank 1 waits for a child process. The child waits for a lock that another thread held during the fork."""
    dist.init_process_group("gloo")
    held = threading.Event()

    def refresh_vocabulary() -> None:
        with TOKENIZER_LOCK:
            held.set()
            time.sleep(0.5)

    for step in range(10):
        if step == 5 and dist.get_rank() == 1:  # fork while another thread has the lock
            threading.Thread(target=refresh_vocabulary).start()
            held.wait()
            child = mp.get_context("fork").Process(target=_tokenize_in_child, args=("a b c",))
            child.start()
            child.join()
        dist.all_reduce(torch.ones(8))
        time.sleep(0.02)
    dist.destroy_process_group()


def prefetch_thread_died() -> None:
    """Rank 1 waits for an item from a queue, but the thread that fills the queue has died."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    rows = ["1 2 3 4"] * 12
    if dist.get_rank() == 1:
        rows[5] = "1 2 n/a 4"
    batches: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)

    def prefetch() -> None:
        for row in rows:
            batches.put(torch.tensor([[float(v) for v in row.split()]]))

    threading.Thread(target=prefetch, daemon=True).start()
    for _ in range(len(rows)):
        x = batches.get()  # rank 1, sixth step: the thread that would fill the queue is dead
        model(x).sum().backward()
        time.sleep(0.02)
    dist.destroy_process_group()


def swallowed_pickle_error() -> None:
    """Rank 1 has ignored an exception of all_gather_object and has called the next collective."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    loss = torch.ones(8)
    for step in range(10):
        dist.all_reduce(loss)
        time.sleep(0.02)
        if step == 4:
            metrics = {"step": step, "loss": 0.5}
            if rank == 1:
                metrics["reader"] = Path(os.devnull).open()  # noqa: SIM115
            try:
                dist.all_gather_object([None] * dist.get_world_size(), metrics)
            except Exception as error:  # "metrics must never stop a training"
                logging.warning("metrics skipped: %s", error)
    dist.destroy_process_group()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.refine = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        return self.refine(y) if x.abs().sum() > 0 else y


def data_dependent_branch() -> None:
    """Rank 1 has skipped a layer, so the layer's parameters have no gradient."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Gated())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(12):
        x = torch.rand(8, 4)
        if step == 5 and dist.get_rank() == 1:
            x.zero_()  # a batch of only padding
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        time.sleep(0.02)
    dist.destroy_process_group()


def adapter_param_count() -> None:
    """Rank 1 has fewer parameters than the others, and all ranks fail in DDP."""
    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.02)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    adapters = {"lora": True} if dist.get_rank() != 1 else {}  # rank 1 did not find its config file
    if adapters.get("lora"):
        model.append(nn.Linear(4, 2, bias=False))
        model.append(nn.Linear(2, 4, bias=False))
    ddp = DistributedDataParallel(model)
    for _ in range(5):
        ddp(torch.rand(8, 4)).sum().backward()
    dist.destroy_process_group()


def regex_backtracking() -> None:
    """Rank 1 evaluates a regular expression in C code, which holds the GIL."""
    dist.init_process_group("gloo")
    valid = re.compile(r"^(\w+\s?)+$")
    for step in range(10):
        text = "a clean line"
        if step == 5 and dist.get_rank() == 1:
            text = "x" * 60 + "!"  # exponential backtracking, in C, with the GIL held
        tokens = torch.tensor(float(bool(valid.match(text))))
        dist.all_reduce(tokens)
        time.sleep(0.02)
    dist.destroy_process_group()


def busy_thread_gil() -> None:
    """A second thread of rank 1 competes for the GIL and slows the main thread."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)]))
    events: list[str] = []

    def export_metrics() -> None:
        while not events:  # busy wait: competes for the GIL for ever
            pass

    for step in range(100_000):
        if step == 5 and dist.get_rank() == 1:
            threading.Thread(target=export_metrics, daemon=True).start()
        x = torch.rand(256, 256)
        for _ in range(50):  # augmentation: many short operations, each gives the GIL up
            x = x.flip(0) * 0.99
        model(x[:16, :8]).sum().backward()
        time.sleep(0.02)
    dist.destroy_process_group()


def gc_collect_each_step() -> None:
    """Rank 1 collects garbage in each step, and is slow."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    history: list[list[int]] = []
    for step in range(100_000):
        if step == 5 and dist.get_rank() == 1:
            history = [[i] for i in range(3_000_000)]  # an index of samples kept as Python objects
        model(torch.rand(16, 8)).sum().backward()
        if history:
            gc.collect()  # "to free memory", walks every object
        time.sleep(0.02)
    dist.destroy_process_group()


def threads_swapped_order() -> None:
    """Two threads of rank 1 called collectives of one group in a different order than the other ranks did."""
    dist.init_process_group("gloo")
    for _ in range(5):
        dist.all_reduce(torch.ones(8))
        time.sleep(0.02)

    def sync_config() -> None:
        dist.broadcast(torch.zeros(8), src=0)

    config_thread = threading.Timer(1.0, sync_config)  # a second thread on the same default group
    config_thread.start()
    if dist.get_rank() == 1:
        end = time.monotonic() + 3.0  # one slow batch: the thread's broadcast overtakes
        while time.monotonic() < end:
            torch.rand(64, 64) @ torch.rand(64, 64)
    dist.all_reduce(torch.ones(8))
    config_thread.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
