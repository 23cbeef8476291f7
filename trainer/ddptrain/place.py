"""A rank's place in the world, as its environment tells it. Knows nothing of torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddptrain.errors import TrainError
from ddptrain.options.ranks import RankOptions
from ddpwire import names
from ddpwire.exits import Exit

ENV = "env://"  # where the ranks meet, unless --init-method says otherwise
_OF_MPI = {  # Open MPI's names: https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables
    names.RANK: "OMPI_COMM_WORLD_RANK",
    names.WORLD_SIZE: "OMPI_COMM_WORLD_SIZE",
    names.LOCAL_RANK: "OMPI_COMM_WORLD_LOCAL_RANK",
    names.LOCAL_WORLD_SIZE: "OMPI_COMM_WORLD_LOCAL_SIZE",
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of how many ranks this is, over all nodes and on its own."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which talks and writes for all."""
        return self.rank == 0


def read_place(environ: Mapping[str, str], how: RankOptions | None = None) -> Place:
    """The place that the options give, else the variables of ddprun or torchrun, or mpirun's; without any, one process.

    Without LOCAL_RANK all ranks are on this machine. Raises TrainError.
    """
    environ = _with_options(environ, how or RankOptions())
    if names.RANK not in environ and names.WORLD_SIZE not in environ:
        return Place()
    rank, size = _number(environ, names.RANK), _number(environ, names.WORLD_SIZE)
    local_rank = _number(environ, names.LOCAL_RANK, default=rank)
    local_size = _number(
        environ, names.LOCAL_WORLD_SIZE, default=local_rank + 1 if names.LOCAL_RANK in environ else size
    )
    if rank >= size:
        raise _wrong(f"{names.RANK}={rank} is not below {names.WORLD_SIZE}={size}")
    if local_rank >= local_size:
        raise _wrong(f"{names.LOCAL_RANK}={local_rank} is not below {names.LOCAL_WORLD_SIZE}={local_size}")
    if size > 1 and (how is None or needs_master(how)):
        for name in (names.MASTER_ADDR, names.MASTER_PORT):
            if not environ.get(name):
                raise _wrong(f"{names.WORLD_SIZE}={size}, but {name} is not set")
        if not 0 < _number(environ, names.MASTER_PORT) < 1 << 16:
            raise _wrong(f"{names.MASTER_PORT}={environ[names.MASTER_PORT]} is no port from 1 to 65535")
    return Place(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def needs_master(how: RankOptions) -> bool:
    """Whether the ranks meet at MASTER_ADDR and MASTER_PORT."""
    return how.init_method == ENV and how.backend != "mpi"


def _with_options(environ: Mapping[str, str], how: RankOptions) -> Mapping[str, str]:
    """The environment as it would be if a launcher had said what the options say. Raises TrainError."""
    if how.backend == "mpi" and names.RANK not in environ:
        environ = {**environ, **{name: environ[mpi] for name, mpi in _OF_MPI.items() if mpi in environ}}
    given = {names.RANK: how.rank, names.WORLD_SIZE: how.world_size}
    for name, value in given.items():
        if value is not None and environ.get(name, str(value)) != str(value):
            flag = "--" + name.lower().replace("_", "-")
            raise TrainError(Exit.CONFIG, f"{flag} {value}, but {name}={environ[name]}: give one of them", rank=None)
    return {**environ, **{name: str(value) for name, value in given.items() if value is not None}}


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its cgroup's quota rounded down; at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, int(_cgroup_quota() or cores)))


def _cgroup_quota() -> float | None:
    """Cores of CPU time that the container's cgroup (v2, then v1) grants; None: no limit that can be seen."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            folder = Path("/sys/fs/cgroup/cpu")
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise _wrong(f"{name} is not set, but other variables of a rank are")
    if not text.isdecimal():
        raise _wrong(f"{name}={text!r} is not a whole number from 0")
    return int(text)


def _wrong(message: str) -> TrainError:
    hint = f"{message}; start ranks with ddprun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    return TrainError(Exit.CONFIG, hint, rank=None)
