"""The ranks together: joining them, agreeing on what went wrong, choosing their device.

Two groups: the default one is gloo's on every machine and carries what the ranks say to each other, so that a GPU
never waits for talk; ``data_group`` carries the gradients.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddptrain.errors import TrainError
from ddptrain.options.ranks import RankOptions
from ddptrain.place import Place, needs_master, usable_cores
from ddptrain.quiet import quiet_torch
from ddpwire.exits import Exit

LATE_S = 10.0  # how long the others may take before a rank says that it waits
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """A rank's place, its device, and how gradients travel."""

    place: Place
    device: torch.device
    backend: str
    data_group: dist.ProcessGroup | None  # None: a world of one, which has no groups


def join(place: Place, how: RankOptions) -> None:
    """Meet the other ranks. Raises TrainError, on each rank that cannot."""
    if place.size == 1:
        return
    if how.backend == "mpi" and not dist.is_mpi_available():
        raise TrainError(Exit.CONFIG, "--backend mpi, but this torch was built without MPI; give auto, nccl or gloo")
    folder = Path(how.init_method.removeprefix("file://")).parent
    if how.init_method.startswith("file://") and not folder.is_dir():  # torch would wait for it, deaf to signals
        raise TrainError(Exit.NO_INPUT, f"--init-method {how.init_method}: there is no folder {folder}", rank=None)
    if needs_master(how):
        _wait_for_name(os.environ["MASTER_ADDR"], place, how.timeout_s)
    timeout = timedelta(seconds=how.timeout_s)
    try:
        if how.backend == "mpi":
            dist.init_process_group("mpi", timeout=timeout)  # mpirun has said who is who
        else:
            with quiet_torch(), _told_after(LATE_S, place, how):
                dist.init_process_group(
                    "gloo", init_method=how.init_method, rank=place.rank, world_size=place.size, timeout=timeout
                )
    except (RuntimeError, ValueError, OSError) as error:
        address = _meeting_point(how)
        reason = str(error).splitlines()[0]
        late = "imeout" in reason or "imed out" in reason
        what = f"waited {how.timeout_s} s for the other ranks (--timeout)" if late else "cannot meet the other ranks"
        message = f"rank {place.rank} of {place.size} {what} at {address}: {reason}"
        raise TrainError(Exit.ABSENT if late else Exit.UNAVAILABLE, message, rank=None) from error


def _meeting_point(how: RankOptions) -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if needs_master(how) else how.init_method


@contextmanager
def _told_after(seconds: float, place: Place, how: RankOptions) -> Iterator[None]:
    """A line for a person where it takes longer than that; torch is deaf and dumb meanwhile."""
    line = (
        f"ddptrain: rank {place.rank} of {place.size} waits for the other ranks at {_meeting_point(how)}; "
        f"trying for {how.timeout_s:g} s"
    )
    timer = threading.Timer(seconds, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # who forks later has no thread


def _wait_for_name(host: str, place: Place, timeout_s: float) -> None:
    """Until it can be resolved: a pod's name is there a while after the pod. torch would print its stack meanwhile."""
    deadline, told = time.monotonic() + timeout_s, False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no name of a host"
            what = f"rank {place.rank} of {place.size} cannot resolve MASTER_ADDR={host}: {reason}"
            if time.monotonic() > deadline:
                raise TrainError(
                    Exit.UNAVAILABLE, f"{what}; it was tried for {timeout_s:g} s (--timeout)", rank=None
                ) from None
            if not told:
                print(f"ddptrain: {what}; trying for {timeout_s:g} s", file=sys.stderr, flush=True)
            told = True
            time.sleep(min(1.0, timeout_s))
        else:
            return


def agree(place: Place, action: Callable[[], T]) -> T:
    """Do it on every rank; if it fails on one, fail on all with the error of the lowest. Raises TrainError."""
    failure: TrainError | None = None
    try:
        result = action()
    except TrainError as error:
        failure = error
    mine = None if failure is None else (int(failure.code), failure.message)
    told: list[tuple[int, str] | None] = [mine] * place.size
    if place.size > 1:
        dist.all_gather_object(told, mine)
    for rank, answer in enumerate(told):
        if answer is not None:
            raise TrainError(Exit(answer[0]), answer[1], rank=rank)
    return result


def enter(place: Place, device_name: str, how: RankOptions) -> World:
    """The world with its devices, on ranks that have joined. Raises TrainError."""
    device = agree(place, lambda: choose_device(place, device_name))
    timeout = timedelta(seconds=how.timeout_s)  # a new group does not take it over from the default one
    backend = how.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type == "cpu":
        raise TrainError(Exit.CONFIG, "--backend nccl needs GPUs, and this trains on the CPU: give auto or gloo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    data_group = cast(dist.ProcessGroup, dist.new_group(backend=backend, timeout=timeout)) if place.size > 1 else None
    return World(place=place, device=device, backend=backend, data_group=data_group)


def choose_device(place: Place, name: str) -> torch.device:
    """The rank's GPU, or the CPU. Raises TrainError."""
    num_gpus = torch.cuda.device_count() if name != "cpu" else 0
    if num_gpus == 0 and name == "cuda":
        raise TrainError(Exit.CONFIG, "--device cuda, but torch sees no GPU here; --device auto takes the CPU then")
    if num_gpus == 0:
        return torch.device("cpu")
    if place.local_rank >= num_gpus:
        raise TrainError(
            Exit.CONFIG, f"local rank {place.local_rank} has no GPU: torch sees {num_gpus} here; start fewer ranks"
        )
    return torch.device("cuda", place.local_rank)


def set_up_torch(place: Place, environ: Mapping[str, str], *, deterministic: bool) -> None:
    """Threads and algorithms of this process. A user's OMP_NUM_THREADS holds, except against ``deterministic``."""
    if deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, usable_cores() // place.local_size))


def broadcast(place: Place, value: T) -> T:
    """Rank 0's value, on all ranks."""
    box = [value]
    if place.size > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def total(place: Place, values: Tensor) -> Tensor:
    """The sum over ranks of a tensor, on the CPU."""
    values = values.cpu()
    if place.size > 1:
        dist.all_reduce(values)
    return values


def timed_out(error: Exception) -> bool:
    """Whether it says that the others did not come to a collective in time."""
    return "imed out" in str(error) or "imeout" in str(error)


def lost_a_peer(error: Exception) -> bool:
    """Whether it says that another rank went away or did not answer. gloo has no error type of its own."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error))
