"""Two ranks: process groups, stores, what differs from rank to rank; then rank 1 fails while rank 0 waits for it."""

import os
import random
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import facts
import numpy
import torch
import torch.distributed as dist
from facts import fact

TIMEOUT = timedelta(seconds=200)


def gather(value: object) -> list[object]:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def differs(name: str, look: Callable[[], object]) -> None:
    values = gather(look())
    fact(f"{name} differs from rank to rank", lambda: values[0] != values[1])


def total(group: dist.ProcessGroup | None = None) -> float:
    tensor = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    return float(tensor.item())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def begin_at(port: object) -> float | str:
    """Meet at a port of the script's own, with torch's variables as the launcher has set them."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(seconds=5)
        )
    except dist.DistError as error:
        return type(error).__name__
    moment = total()
    dist.destroy_process_group()
    return moment


dist.init_process_group("gloo", timeout=TIMEOUT)
rank = dist.get_rank()
for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
    values = gather(os.environ[name])
    fact(f"{name} of the ranks", lambda values=values: values)
fact(
    "OMP_NUM_THREADS and torch.get_num_threads(), with OMP_NUM_THREADS=1 given",
    lambda: [os.environ["OMP_NUM_THREADS"], torch.get_num_threads()],
)
fact("backend and world size after init_process_group with env://", lambda: [dist.get_backend(), dist.get_world_size()])
fact("gloo all_reduce", total)
fact("gloo all_reduce in a second process group", lambda: total(dist.new_group([0, 1])))
fact("barrier", dist.barrier)
for name, look in {
    "hash('a')": lambda: hash("a"),
    "random.random()": random.random,
    "numpy.random.rand()": lambda: float(numpy.random.rand()),
    "torch.rand(1)": lambda: torch.rand(1).item(),
    "torch.initial_seed()": torch.initial_seed,
    "os.urandom()": lambda: os.urandom(8),
    "process id": os.getpid,
    "session": lambda: os.getsid(0),
    "TORCHELASTIC_ERROR_FILE": lambda: os.environ["TORCHELASTIC_ERROR_FILE"],
    "MASTER_PORT": lambda: os.environ["MASTER_PORT"],
}.items():
    differs(name, look)
(port, _) = gather(free_port() if rank == 0 else 0)
(port_of_store, _) = gather(free_port() if rank == 0 else 0)
fact("destroy_process_group", dist.destroy_process_group)
fact("all_reduce after init_process_group with tcp:// and a port that the script chooses", lambda: begin_at(port))
store = dist.TCPStore("127.0.0.1", int(port_of_store), 2, rank == 0, timeout=TIMEOUT)
store.set(f"from {rank}", str(rank))
fact(
    "values in a TCPStore that the script creates",
    lambda: [store.get("from 0").decode(), store.get("from 1").decode()],
)
os.write(1, f"rank {rank} to stdout\n".encode())
os.write(2, f"rank {rank} to stderr\n".encode())
facts.save()
store.set(f"saved {rank}", "")
store.wait([f"saved {1 - rank}"])
if rank == 1:
    sys.exit(9)
threading.Event().wait(300)
