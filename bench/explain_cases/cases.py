"""The causes that bench/explain.py injects, one function each. The argument of this training script is a case's name.

The script first takes a few normal steps, so that the usual duration of a step is known. Rank 1 of four is at fault.
"""

import ctypes
import fcntl
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

RANK = int(os.environ["RANK"])
FOR_EVER_S = 10_000
TIMEOUT = timedelta(seconds=int(os.environ.get("EXPLAIN_TIMEOUT_S", "1800")))  # 1800 is torch's default for gloo
AT_FAULT = 1
CASES: dict[str, Callable[[], None]] = {}


def case(run: Callable[[], None]) -> Callable[[], None]:
    CASES[run.__name__] = run
    return run


def reduce(size: int = 13, times: int = 1, dtype: torch.dtype = torch.float32, pause_s: float = 0.02) -> None:
    for _ in range(times):
        time.sleep(pause_s)
        dist.all_reduce(torch.ones(size, dtype=dtype))


def join() -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    reduce(times=5)


def only_here(action: Callable[[], object]) -> None:
    join()
    if RANK == AT_FAULT:
        action()
    reduce(times=3)
    dist.barrier()


def spin() -> None:
    end = time.monotonic() + FOR_EVER_S
    while time.monotonic() < end:
        pass


# ---- Collectives


@case
def sleeps() -> None:
    only_here(lambda: time.sleep(FOR_EVER_S))


@case
def other_size() -> None:
    join()
    reduce(7 if RANK == AT_FAULT else 13)
    dist.barrier()


@case
def other_type() -> None:
    join()
    reduce(dtype=torch.float64 if RANK == AT_FAULT else torch.float32)
    dist.barrier()


@case
def other_operation() -> None:
    join()
    if RANK == AT_FAULT:
        dist.broadcast(torch.ones(13), 0)
    else:
        dist.all_reduce(torch.ones(13))
    dist.barrier()


@case
def skips_one() -> None:
    join()
    if RANK != AT_FAULT:
        reduce()
    dist.barrier()


@case
def barrier_in_a_branch() -> None:
    join()
    if RANK == AT_FAULT:
        dist.barrier()
    reduce()


@case
def other_order() -> None:
    join()
    pair, world = dist.new_group([0, 1]), None
    for group in (pair, world) if RANK == AT_FAULT else (world, pair):
        if group is None or RANK < 2:
            dist.all_reduce(torch.ones(3), group=group)


@case
def subgroup_lacks_one() -> None:
    join()
    pair = dist.new_group([0, 1], group_desc="pair")
    if RANK < 2:
        dist.all_reduce(torch.ones(3), group=pair)
    if RANK == 0:
        dist.all_reduce(torch.ones(3), group=pair)
    if RANK == AT_FAULT:
        time.sleep(FOR_EVER_S)
    dist.barrier()


@case
def no_sender() -> None:
    join()
    if RANK == AT_FAULT:
        dist.recv(torch.ones(1), src=0)
    dist.barrier()


@case
def never_joins() -> None:
    if RANK == AT_FAULT:
        time.sleep(FOR_EVER_S)
    join()


@case
def new_group_in_one_rank() -> None:
    join()
    if RANK == AT_FAULT:
        dist.new_group([0, 1, 2, 3])
    reduce(times=3)


@case
def receives_in_a_ring() -> None:
    join()
    dist.recv(torch.ones(3), src=(RANK + 1) % 4)
    dist.send(torch.ones(3), dst=(RANK - 1) % 4)


@case
def sender_sleeps() -> None:
    join()
    if RANK == AT_FAULT:
        time.sleep(FOR_EVER_S)
    dist.recv(torch.ones(3), src=AT_FAULT)


# ---- Ranks that end


@case
def raises() -> None:
    def fail() -> None:
        raise KeyError("label 17")

    only_here(fail)


@case
def exits_3() -> None:
    only_here(lambda: sys.exit(3))


@case
def exits_0() -> None:
    only_here(lambda: os._exit(0))


@case
def is_killed() -> None:
    only_here(lambda: os.kill(os.getpid(), signal.SIGKILL))


@case
def segfaults() -> None:
    only_here(lambda: ctypes.string_at(0))


@case
def aborts() -> None:
    only_here(os.abort)


@case
def uneven_inputs() -> None:
    join()
    for _ in range(5 if RANK == AT_FAULT else 6):
        reduce()


@case
def disk_full() -> None:
    def fill() -> None:
        with Path("/dev/full").open("wb") as file:
            torch.save(torch.ones(10), file)

    only_here(fill)


@case
def data_missing() -> None:
    only_here(lambda: Path("/nowhere/train.bin").read_bytes())


@case
def loss_is_nan() -> None:
    def check() -> None:
        if not torch.isfinite(torch.tensor(float("nan"))):
            raise FloatingPointError("the loss is NaN at step 6")

    only_here(check)


@case
def reports_nan() -> None:
    """The loss of one rank is NaN at step 12; at the next step, after the all-reduce, it is NaN everywhere."""
    import ddpwire.script as ddp

    join()
    for step in range(1, 100_000):
        loss = torch.tensor(float("nan") if step > 12 or (step == 12 and RANK == AT_FAULT) else 1 / step)
        ddp.progress(step, loss=loss)
        reduce()


@case
def ddptrain_diverges() -> None:
    sys.argv = ["ddptrain", "--epochs", "100", "--lr", "1e30", "--device", "cpu"]
    runpy.run_module("ddptrain", run_name="__main__", alter_sys=True)


# ---- Ranks that wait for something else


@case
def is_stopped() -> None:
    only_here(lambda: os.kill(os.getpid(), signal.SIGSTOP))


@case
def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    only_here(lock.acquire)


@case
def joins_a_thread() -> None:
    def wait() -> None:
        thread = threading.Thread(target=time.sleep, args=(FOR_EVER_S,), daemon=True)
        thread.start()
        thread.join()

    only_here(wait)


@case
def waits_for_a_file_lock() -> None:
    def lock() -> None:
        with tempfile.NamedTemporaryFile() as first, Path(first.name).open() as second:
            fcntl.flock(first, fcntl.LOCK_EX)
            fcntl.flock(second, fcntl.LOCK_EX)

    only_here(lock)


@case
def waits_for_a_process() -> None:
    only_here(lambda: subprocess.run(["/bin/sleep", str(FOR_EVER_S)], check=False))


@case
def waits_for_the_network() -> None:
    def download() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
            client.recv(1)

    only_here(download)


@case
def reads_a_pipe() -> None:
    def read() -> None:
        path = Path(tempfile.mkdtemp()) / "fifo"
        os.mkfifo(path)
        path.read_bytes()

    only_here(read)


@case
def waits_for_stdin() -> None:
    def ask() -> None:
        reader, _ = os.pipe()
        os.fdopen(reader).readline()

    only_here(ask)


@case
def computes() -> None:
    only_here(spin)


@case
def holds_the_gil() -> None:
    only_here(lambda: sum(range(10**12)))


@case
def checkpoint_blocks() -> None:
    def save() -> None:
        path = Path(tempfile.mkdtemp()) / "checkpoint.pt"
        os.mkfifo(path)
        torch.save(torch.ones(10), path)

    only_here(save)


# ---- Data


class Items(Dataset[torch.Tensor]):
    def __init__(self, read: Callable[[int], None]) -> None:
        self._read = read

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        self._read(index)
        return torch.ones(13)


def train(read: Callable[[int], None], workers: int) -> None:
    join()
    for batch in DataLoader(Items(read), batch_size=2, num_workers=workers):
        dist.all_reduce(batch.sum(0))


def stall(index: int) -> None:
    if RANK == AT_FAULT and index > 40:
        time.sleep(FOR_EVER_S)


@case
def worker_stalls() -> None:
    train(stall, workers=2)


@case
def data_stalls() -> None:
    train(stall, workers=0)


@case
def worker_is_stopped() -> None:
    def stop(index: int) -> None:
        if RANK == AT_FAULT and index > 40:
            os.kill(os.getpid(), signal.SIGSTOP)

    train(stop, workers=1)


@case
def worker_raises() -> None:
    def fail(index: int) -> None:
        if RANK == AT_FAULT and index > 40:
            raise EOFError("Ran out of input")

    train(fail, workers=1)


@case
def stream_ends_early() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self):
            yield from (torch.ones(13) for _ in range(10 if RANK == AT_FAULT else 20))

    join()
    for item in DataLoader(Stream(), batch_size=1):
        dist.all_reduce(item)


@case
def slow_data_in_one_rank() -> None:
    train(lambda _: time.sleep(0.1 if RANK == AT_FAULT else 0.01), workers=1)


@case
def slow_data() -> None:
    train(lambda _: time.sleep(0.1), workers=1)


# ---- What bench/explain_cases/nodes.py injects from outside


def go_on(pause: Callable[[int], float]) -> None:
    join()
    for step in range(100_000):
        reduce(pause_s=pause(step))


@case
def goes_on() -> None:
    go_on(lambda _: 0.02)


@case
def sends_much() -> None:
    join()
    reduce(size=250_000, times=100_000)


@case
def eats_memory() -> None:
    def eat() -> None:
        kept = []
        while True:
            kept.append(torch.ones(10_000_000))
            time.sleep(0.05)

    only_here(eat)


@case
def computes_a_little() -> None:
    join()
    for _ in range(100_000):
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        reduce(pause_s=0.08)


@case
def writes_to_disk() -> None:
    join()
    for _ in range(100_000):
        if RANK == AT_FAULT:
            torch.save(torch.ones(10), f"{os.environ['DISK']}/checkpoint.pt")
        reduce()


@case
def reads_from_disk() -> None:
    only_here(lambda: Path(os.environ["DISK"], "large.bin").read_bytes())


# ---- DDP


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(13, 13), nn.Linear(13, 13)

    def forward(self, batch: torch.Tensor, *, both: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(batch)
        return self.second(hidden) if both else hidden


def train_ddp(uses_both: Callable[[int], bool], before_step: Callable[[], None] = lambda: None) -> None:
    join()
    model = DistributedDataParallel(Branches())
    for step in range(100_000):
        before_step()
        model(torch.ones(4, 13), both=uses_both(step)).sum().backward()


@case
def unused_parameters() -> None:
    train_ddp(lambda step: step < 5)


@case
def unused_parameters_in_one_rank() -> None:
    train_ddp(lambda step: step < 5 or RANK != AT_FAULT)


@case
def straggler() -> None:
    def work() -> None:
        slow_function() if RANK == AT_FAULT else time.sleep(0.05)

    train_ddp(lambda _: True, work)


def slow_function() -> None:
    time.sleep(0.15)


@case
def sleeps_before_backward() -> None:
    steps = iter(range(1000))
    train_ddp(lambda _: True, lambda: time.sleep(FOR_EVER_S if RANK == AT_FAULT and next(steps) > 5 else 0.02))


if __name__ == "__main__":
    CASES[sys.argv[1]]()
