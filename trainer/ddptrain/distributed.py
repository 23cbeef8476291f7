"""The ranks of a training: their numbers, their rendezvous, the exchange of values, their devices, and the DDP wrapper.

There are two process groups. The default group uses gloo, or MPI with ``--backend mpi``. The ranks use this group to
exchange values on the CPU, so that no GPU waits for the exchange. ``World.data_group`` carries the gradients.
"""

import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddprank.torch_log import CPP_LOG_LEVEL, set_cpp_log_level
from ddptrain.checkpoint import map_tensors
from ddptrain.config import SHARDED, Options, RankOptions
from ddptrain.errors import TrainError, config_error, log_error
from ddpwire import names
from ddpwire.communication import AUTO, parse_way
from ddpwire.exits import Exit
from ddpwire.machine import MAX_PORT, usable_cores

ENV_INIT_METHOD = "env://"  # where the ranks meet, unless --init-method says otherwise
_OPEN_MPI_NAMES = {  # Open MPI's names: https://www.open-mpi.org/faq/?category=running#mpi-environmental-variables
    names.RANK: "OMPI_COMM_WORLD_RANK",
    names.WORLD_SIZE: "OMPI_COMM_WORLD_SIZE",
    names.LOCAL_RANK: "OMPI_COMM_WORLD_LOCAL_RANK",
    names.LOCAL_WORLD_SIZE: "OMPI_COMM_WORLD_LOCAL_SIZE",
}
LATE_S = 10.0  # how long a rank waits for the others before it prints that it is waiting
T = TypeVar("T")
CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes that keep a graph's memory
_LOST = re.compile(
    "ncclRemoteError|closed by remote|reset by peer|refused|broken pipe|unreachable|no route|time(d )?out"
    "|completion from peer|remote process exited",
    re.IGNORECASE,
)
_NCCL2 = "\nNCCL Last Error:"


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """The rank and the world size, over all nodes and on this node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs and writes for all ranks."""
        return self.rank == 0


def read_rank_info(environ: Mapping[str, str], options: RankOptions | None = None) -> RankInfo:
    """Return the rank from the options, else from the variables of ddprun, torchrun or mpirun, else rank 0 of 1.

    If LOCAL_RANK is missing, all ranks are assumed to be on this machine. Raises TrainError.
    """
    options = options or RankOptions()
    environ = _with_options(environ, options)
    if names.RANK not in environ and names.WORLD_SIZE not in environ:
        return RankInfo()
    rank, size = _number(environ, names.RANK), _number(environ, names.WORLD_SIZE)
    local_rank = _number(environ, names.LOCAL_RANK, default=rank)
    local_world_size = _number(
        environ, names.LOCAL_WORLD_SIZE, default=local_rank + 1 if names.LOCAL_RANK in environ else size
    )
    if rank >= size:
        raise _rank_error(f"{names.RANK}={rank} is not less than {names.WORLD_SIZE}={size}")
    if local_rank >= local_world_size:
        raise _rank_error(
            f"{names.LOCAL_RANK}={local_rank} is not less than {names.LOCAL_WORLD_SIZE}={local_world_size}"
        )
    if size > 1 and needs_master(options):
        for name in (names.MASTER_ADDR, names.MASTER_PORT):
            if not environ.get(name):
                raise _rank_error(f"{names.WORLD_SIZE}={size}, but {name} is not set")
        if not 0 < _number(environ, names.MASTER_PORT) <= MAX_PORT:
            raise _rank_error(f"{names.MASTER_PORT}={environ[names.MASTER_PORT]} is not a port from 1 to {MAX_PORT}")
    return RankInfo(rank=rank, size=size, local_rank=local_rank, local_world_size=local_world_size)


def needs_master(options: RankOptions) -> bool:
    """Return whether the ranks meet at MASTER_ADDR and MASTER_PORT."""
    return options.init_method == ENV_INIT_METHOD and options.backend != "mpi"


def _with_options(environ: Mapping[str, str], options: RankOptions) -> Mapping[str, str]:
    if options.backend == "mpi" and names.RANK not in environ:
        environ = {**environ, **{name: environ[mpi] for name, mpi in _OPEN_MPI_NAMES.items() if mpi in environ}}
    for name, value in ((names.RANK, options.rank), (names.WORLD_SIZE, options.world_size)):
        if value is not None and environ.get(name, str(value)) != str(value):
            flag = "--" + name.lower().replace("_", "-")
            raise config_error(f"{flag} {value}, but {name}={environ[name]}", hint="give only one of them", rank=None)
        environ = environ if value is None else {**environ, name: str(value)}
    return environ


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise _rank_error(f"{name} is not set, although other variables of a rank are set")
    if not text.isdecimal():
        raise _rank_error(f"{name}={text!r} is not a whole number of at least 0")
    return int(text)


def _rank_error(message: str) -> TrainError:
    advice = "start ranks with ddprun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    return config_error(f"{message}; {advice}", rank=None)


@dataclass(frozen=True, kw_only=True)
class World:
    """A rank, its device, and the process group for the gradients."""

    rank_info: RankInfo
    device: torch.device
    backend: str
    data_group: dist.ProcessGroup | None  # None: a single rank has no groups


def join_ranks(rank_info: RankInfo, options: RankOptions) -> None:
    """Create the default process group. Raises TrainError on each rank that cannot join it."""
    if rank_info.size == 1:
        return
    if options.backend == "mpi" and not dist.is_mpi_available():
        raise config_error("--backend mpi, but this torch was built without MPI: give auto, nccl or gloo")
    folder = Path(options.init_method.removeprefix("file://")).parent
    # torch would wait for the folder, and handle no signal
    if options.init_method.startswith("file://") and not folder.is_dir():
        raise TrainError(Exit.NO_INPUT, f"--init-method {options.init_method}: {folder} does not exist", rank=None)
    if needs_master(options):
        _wait_for_dns(os.environ["MASTER_ADDR"], rank_info, options.timeout_s)
    timeout = timedelta(seconds=options.timeout_s)
    try:
        if options.backend == "mpi":
            dist.init_process_group("mpi", timeout=timeout)  # mpirun numbers the ranks
        else:
            with torch_cpp_log_off(), _log_if_late(LATE_S, rank_info, options):
                where, rank, size = options.init_method, rank_info.rank, rank_info.size
                dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        late = is_timeout(error)
        waited = f"waited {options.timeout_s} s (--timeout) for the other ranks"
        failure = f"{waited if late else 'cannot meet the other ranks'} at {_meeting_point(options)}"
        message = f"rank {rank_info.rank} of {rank_info.size} {failure}: {str(error).splitlines()[0]}"
        raise TrainError(Exit.ABSENT if late else Exit.UNAVAILABLE, message, rank=None) from error


def _meeting_point(options: RankOptions) -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}" if needs_master(options) else options.init_method


@contextmanager
def _log_if_late(seconds: float, rank_info: RankInfo, options: RankOptions) -> Iterator[None]:
    """If the ``with`` block takes longer than ``seconds``, print that this rank is waiting for the other ranks."""
    line = (
        f"rank {rank_info.rank} of {rank_info.size} waits up to {options.timeout_s:g} s (--timeout) for the "
        f"other ranks at {_meeting_point(options)}"
    )
    timer = threading.Timer(seconds, log_error, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that no thread is left at a later fork


def _wait_for_dns(host: str, rank_info: RankInfo, timeout_s: float) -> None:
    """Wait until the name can be resolved. The name of a pod may appear later than the pod. Raises TrainError."""
    deadline, logged = time.monotonic() + timeout_s, False
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            failure = f"rank {rank_info.rank} of {rank_info.size} cannot resolve MASTER_ADDR={host}: {reason}"
            if time.monotonic() > deadline:
                message = f"{failure}; gave up after {timeout_s:g} s (--timeout)"
                raise TrainError(Exit.UNAVAILABLE, message, rank=None) from None
            if not logged:
                log_error(f"{failure}; trying again for up to {timeout_s:g} s")
            logged = True
            time.sleep(min(1.0, timeout_s))


@contextmanager
def torch_cpp_log_off() -> Iterator[None]:
    """Turn off the log of torch's C++ code during the rendezvous, unless the user has set its level.

    The rendezvous raises exceptions with one-line messages, to which the log would add C++ stack traces.
    """
    if CPP_LOG_LEVEL in os.environ:
        yield
        return
    set_cpp_log_level("FATAL", torch.__file__)
    try:
        yield
    finally:
        set_cpp_log_level("WARNING", torch.__file__)  # torch's own default
        del os.environ[CPP_LOG_LEVEL]


def make_world(rank_info: RankInfo, device_name: str, options: RankOptions) -> World:
    """Choose the device, and create the group for the gradients. Call `join_ranks` first. Raises TrainError."""
    device = agree(rank_info, lambda: take_device(rank_info, device_name))
    check_same_devices(gather(rank_info, device.type))
    timeout = timedelta(seconds=options.timeout_s)  # a new group does not inherit it from the default one
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if backend == "nccl" and device.type == "cpu":
        raise config_error("--backend nccl needs GPUs, but this run trains on the CPU", hint="give auto or gloo")
    group = dist.new_group(backend=backend, timeout=timeout) if rank_info.size > 1 else None
    return World(
        rank_info=rank_info, device=device, backend=backend, data_group=cast("dist.ProcessGroup | None", group)
    )


def take_device(rank_info: RankInfo, name: str) -> torch.device:
    """Return the rank's GPU, which becomes the current device of this process, or the CPU. Raises TrainError."""
    num_gpus = torch.cuda.device_count() if name != "cpu" else 0
    if num_gpus == 0 and name == "cuda":
        raise config_error("--device cuda, but torch sees no GPU here; --device auto would use the CPU")
    if num_gpus == 0:
        return torch.device("cpu")
    if rank_info.local_rank >= num_gpus:
        raise config_error(
            f"local rank {rank_info.local_rank} has no GPU: torch sees {num_gpus} here; start fewer ranks"
        )
    device = torch.device("cuda", rank_info.local_rank)
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:  # such as a driver older than torch's CUDA
        reason = str(error).partition("\n")[0].rstrip(".")
        message = f"rank {rank_info.rank} cannot use GPU {device.index} here: {reason}"
        raise config_error(message, hint="--device cpu trains without a GPU") from error
    return device


def check_same_devices(kinds: Sequence[str]) -> None:
    """Raise TrainError on every rank if only some ranks have a GPU. ``kinds`` are the device types of all ranks."""
    without = [rank for rank, kind in enumerate(kinds) if kind == "cpu"]
    if 0 < len(without) < len(kinds):
        owner = next(rank for rank in range(len(kinds)) if rank not in without)
        raise config_error(
            f"rank {without[0]} has no GPU, but rank {owner} has one",
            hint="start ranks only where torch sees a GPU, or give --device cpu",
        )


def gather(rank_info: RankInfo, value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks. Every rank must call this."""
    values = [value] * rank_info.size
    if rank_info.size > 1:
        dist.all_gather_object(values, value)
    return values


def agree(rank_info: RankInfo, action: Callable[[], T]) -> T:
    """Return the result of ``action``. If ``action`` raises TrainError on one rank, raise this error on all ranks.

    If ``action`` fails on several ranks, the error of the lowest rank is raised. Every rank must call this.
    """
    failure: tuple[Exit, str] | None = None
    try:
        result = action()
    except TrainError as error:
        failure = error.code, str(error)
    for rank, failed in enumerate(gather(rank_info, failure)):
        if failed is not None:
            raise TrainError(*failed, rank=rank)
    return result


def broadcast(rank_info: RankInfo, value: T) -> T:
    """Return rank 0's value on all ranks."""
    values = [value]
    if rank_info.size > 1:
        dist.broadcast_object_list(values, src=0)
    return values[0]


def broadcast_state(rank_info: RankInfo, value: T) -> T:
    """Return rank 0's value on all ranks. Its tensors must be on the CPU. They are sent one by one and not pickled.

    Dense tensors keep their strides, because a fused optimizer's moments must have the same strides as the weights.
    """
    if rank_info.size == 1:
        return value
    tensors: list[Tensor] = []

    def describe(_path: tuple[Any, ...], tensor: Tensor) -> Tensor:
        like = torch.empty_like(tensor, device="meta")  # has no gaps
        tensors.append(tensor.detach() if like.stride() == tensor.stride() else tensor.detach().clone())
        return like

    def make(_path: tuple[Any, ...], like: Tensor) -> Tensor:
        tensors.append(torch.empty_like(like, device="cpu"))
        return tensors[-1]

    described = broadcast(rank_info, map_tensors(value, describe) if rank_info.is_first else None)
    received: T = value if rank_info.is_first else map_tensors(described, make)
    for tensor in filter(Tensor.numel, tensors):
        memory = tensor.as_strided((tensor.numel(),), (1,))
        dist.broadcast(memory.view(torch.uint8), src=0)  # as bytes: gloo does not support every dtype
    return received


def sum_over_ranks(rank_info: RankInfo, values: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, as a tensor on the CPU."""
    values = values.cpu().contiguous()  # gloo ignores strides
    if rank_info.size > 1:
        dist.all_reduce(values)
    return values


def is_timeout(error: Exception) -> bool:
    """Return whether the rendezvous or a collective timed out. Neither torch nor gloo has an error type for this."""
    first_line = str(error).partition("\n")[0].lower()
    return "timed out" in first_line or "timeout" in first_line


def is_lost_peer(error: Exception) -> bool:
    """Return whether another rank exited or did not answer. gloo's RuntimeError names a source file of gloo."""
    if isinstance(error, dist.DistError) or _NCCL2 in str(error):
        return nccl_failure(error) is None
    return isinstance(error, RuntimeError) and "gloo/" in str(error)


def nccl_failure(error: Exception) -> str | None:
    """Return NCCL's reason for a failure. Return None if NCCL lost another rank, or if the error is not from NCCL.

    The text of torch's DistBackendError (NCCLUtils.hpp) has a line "NCCL error in: FILE:LINE, WHAT" and a line
    "ncclKIND: WHAT". After a line "Last error:", there is a line from NCCL. A lost rank is not always an
    ncclRemoteError: https://github.com/NVIDIA/nccl/issues/795. nccl2, the backend "nccl" since torch 2.15, raises a
    RuntimeError (nccl2/ProcessGroupNCCL.hpp): "CALL failed: KIND" and a line with NCCL's last error.
    """
    head, _, text = str(error).partition("\n")
    text = text.partition("Exception raised from")[0]  # torch's C++ stack
    if _NCCL2 in str(error):
        text = f"{head.rpartition(': ')[2].partition(' (')[0]}\nLast error:{text.partition(_NCCL2.strip())[2]}"
    elif not isinstance(error, dist.DistBackendError) or "NCCL error" not in head:
        return None
    if _LOST.search(text):
        return None
    kind, _, last = (part.strip() for part in text.partition("Last error:"))
    if last:
        return f"{kind.partition(':')[0]}: {last.splitlines()[0]}"
    return (kind.splitlines()[0] if kind else head).rstrip(".")


def set_up_torch(rank_info: RankInfo, environ: Mapping[str, str], *, deterministic: bool) -> None:
    """Set the number of torch's threads. Deterministic algorithms use one thread, and ignore OMP_NUM_THREADS."""
    if deterministic:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    elif not environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, usable_cores() // rank_info.local_world_size))


def check_strategy(options: Options, rank_info: RankInfo) -> None:
    """Raise TrainError on every rank if options cannot be combined."""
    ranks, compile_mode = options.ranks, options.machine.compile
    is_sharded, is_dp, many = ranks.strategy in SHARDED, ranks.strategy == "dp", rank_info.size > 1
    strategy, compiled = f"--strategy {ranks.strategy}", f"--compile {compile_mode}"
    if many and ranks.strategy in ("dp", "single"):
        message = f"{strategy} is for one process, but this is one of {rank_info.size} ranks"
        raise config_error(message, hint="give ddp", rank=None)
    if many and compile_mode != "off" and ranks.bucket_mb < 1:
        message = f"--bucket-mb {ranks.bucket_mb:g} cannot be used with --compile, which needs buckets of at least 1 MB"
        raise config_error(message, hint="give at least 1, or --compile off", rank=None)
    communication = ranks.communication if many else "plain"  # a single rank exchanges nothing
    accumulates, ways = options.training.accumulate > 1, f"--communication {communication}"
    is_auto, may_be_unequal = communication == AUTO, ranks.balance == "auto" or len({*ranks.balance.split(":")}) > 1
    may_be_local = is_auto or parse_way(communication).is_local
    conflicts = (
        (strategy, "--compile", is_sharded and compile_mode != "off"),
        (strategy, ways, is_sharded and communication != "plain"),
        (ways, "--deterministic", is_auto and options.machine.deterministic),
        (ways, "--compile", is_auto and compile_mode != "off"),
        (ways, "--ema", may_be_local and options.training.ema > 0),
        (ways, "--sync-bn", may_be_local and ranks.sync_bn),
        (ways, "--balance", may_be_local and may_be_unequal),  # a local step has its own rank's mean gradient
        (strategy, "--sync-bn", is_sharded and ranks.sync_bn),
        (strategy, "--static-graph", is_sharded and ranks.static_graph),
        (strategy, "--optimizer muon", is_sharded and options.optimizer.name == "muon"),
        (strategy, "--recompute", is_dp and options.model.recompute),  # replicas would call the first replica's blocks
        ("--static-graph", "--accumulate", ranks.static_graph and accumulates),
        # The gradients are in a CUDA graph's memory, which the next part overwrites: pytorch/pytorch#169545.
        (compiled, "--accumulate", compile_mode in CUDA_GRAPHS and accumulates),
    )
    for first, second, is_conflict in conflicts:
        if is_conflict:
            raise config_error(f"{first} cannot be used with {second}", hint="leave one of them out", rank=None)


def is_sharded(options: RankOptions, rank_info: RankInfo) -> bool:
    """Return whether the weights are sharded over the ranks. A single rank has all of them."""
    return options.strategy in SHARDED and rank_info.size > 1


def wrap_model(model: nn.Module, options: RankOptions, world: World, *, deterministic: bool) -> nn.Module:
    """Return the model wrapped for training. A single rank needs no wrapper. Every rank must call this.

    If ``deterministic`` is set, the gradients are added in a fixed order. See `lay_out_buckets`. Raises TrainError.
    """
    if options.sync_bn:
        if world.device.type != "cuda":
            raise config_error("--sync-bn needs GPUs: on CPUs, use --norm group instead")
        if world.data_group is not None:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model, world.data_group)  # type: ignore[no-untyped-call]
    if options.strategy == "dp":
        return DataParallel(model)
    if world.data_group is None:
        return model
    # The warning concerns weights of a one-channel convolution, whose memory is the same in both layouts.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        process_group=world.data_group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=options.bucket_view,
        static_graph=options.static_graph,
    )
    if deterministic:
        lay_out_buckets(ddp)
    return ddp


class WithAutocast(nn.Module):
    """A model that enables autocast itself, because the threads of DataParallel do not inherit autocast's dtype."""

    def __init__(self, model: nn.Module, autocast: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.model = model
        self._autocast = autocast

    def forward(self, images_BCHW: Tensor) -> Tensor:  # noqa: N803
        """Return the model's output."""
        with self._autocast():
            return cast(Tensor, self.model(images_BCHW))


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP wrapper of a model, or None if it has none. The model may be compiled."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    return inner if isinstance(inner, DistributedDataParallel) else None


def lay_out_buckets(ddp: DistributedDataParallel) -> None:
    """Give DDP's buckets their final layout before the first step. Every rank must call this.

    DDP groups the gradients into buckets when it is created. After the first backward pass, it groups them again, in
    the order in which they became ready. The place of an element in its bucket determines in which order the all-reduce
    adds the ranks' values. Without this call, the first step after a restart would add these values in another order.
    With three or more ranks, the last bits of the sums would then differ from those of a training without a restart.

    This function computes the sum of one element of each parameter, and runs backward passes from this sum. So the
    layout depends only on the model. Weights, buffers and random generators do not change, and no gradient is left.
    """
    module = ddp.module
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def one_of_each(_: Tensor) -> Tensor:
        return torch.stack([parameter.flatten()[0].float() for parameter in parameters]).sum()

    module.forward = one_of_each
    unused = torch.zeros((), device=parameters[0].device)  # on GPUs DDP cannot be called without an input
    try:
        for _ in range(3):  # buckets are laid out in the second forward pass; with --static-graph in the third
            ddp(unused).backward()
            for parameter in parameters:
                parameter.grad = None
    finally:
        del module.forward
