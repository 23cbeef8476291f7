"""One rank that starts processes of its own in all the ways that torch has."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import facts
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    """Of the class __main__, which a worker must find."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index * index)


def load(method: str) -> list[int]:
    loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
    return torch.cat(list(loader)).tolist()


def train(rank: int, port: int, queue: object) -> None:
    """A process of mp.spawn, as in the tutorials."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=30))
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    queue.put(total.item())  # type: ignore[attr-defined]


def spawn() -> list[float] | str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    queue = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(train, args=(port, queue), nprocs=2)
    except mp.ProcessRaisedException as error:
        return str(error).strip().splitlines()[-1].partition(":")[0]
    return [queue.get(), queue.get()]


def fork() -> int:
    pid = os.fork()
    if not pid:
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        facts.fact(f"DataLoader worker by {method}", lambda method=method: load(method))
    facts.fact("mp.spawn of two processes that train", spawn)
    facts.fact("exit code of a child of os.fork()", fork)
    facts.fact(
        "sys.argv of a subprocess with the same Python",
        lambda: run(sys.executable, "-c", "import sys; print(sys.argv)"),
    )
    facts.fact("RANK and WORLD_SIZE of a subprocess", lambda: run("/bin/sh", "-c", "echo $RANK $WORLD_SIZE"))
    facts.fact("PYTHONUNBUFFERED of a subprocess", lambda: run("/bin/sh", "-c", "echo ${PYTHONUNBUFFERED-not set}"))
    facts.fact("os.system('exit 4')", lambda: os.system("exit 4"))  # noqa: S605
    facts.save()
    kept = Path("kept.txt").open("w")  # noqa: SIM115
    kept.write("written, never closed")
