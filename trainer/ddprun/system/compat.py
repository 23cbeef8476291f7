"""The private interfaces of CPython, torch and prometheus_client that ddprun uses. Each has a check and a fallback.

This module imports a library only when a function needs it, because a process that forks should import little.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import io
import itertools
import json
import runpy
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ddprun.system.errors import config_error

if TYPE_CHECKING:
    from prometheus_client.core import Metric

MIN_TORCH = "2.10"  # as in pyproject.toml; the store of torch 2.6 cannot serve on a socket that is bound already
FORK_NAMES = ((runpy, "_run_module_as_main"), (threading, "_shutdown"), (atexit, "_run_exitfuncs"))

SELF_RECORDING = ("ProcessGroupGloo", "ProcessGroupNCCL")  # types of backends
HOOKED = {"nccl2", "nccl-lazy"}  # backends that tell torch's flight recorder hook when a collective ends


def check_torch() -> None:
    """Import torch. Raises NodeError if it is older than MIN_TORCH."""
    import torch

    if torch.__version__ < MIN_TORCH:  # a TorchVersion compares numbers, not text
        message = f"this Python has torch {torch.__version__}, but ddprun needs {MIN_TORCH} or newer"
        raise config_error(message, hint="install a newer torch, or start the script with torchrun")


def missing_for_fork() -> str:
    """Return the names of functions that this Python lacks, or "" if it has all of them.

    A forked rank needs these functions to behave like an executed rank.
    """
    return ", ".join(f"{module.__name__}.{name}" for module, name in FORK_NAMES if not hasattr(module, name))


def run_module_as_main(name: str, *, alter_argv: bool = True) -> None:
    """Run a module, a folder or a zip file as ``__main__``, as CPython's function pymain_run_module does."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def finalizers() -> Sequence[Callable[[], object]]:
    """Return the functions that CPython calls when it ends: one joins threads, the other calls atexit functions."""
    return threading._shutdown, atexit._run_exitfuncs  # type: ignore[attr-defined]


def import_dynamo() -> None:
    """Import torch._dynamo. If this fails, do nothing.

    DDP and the optimizers need this module. Without this call, each rank would import it.
    """
    with contextlib.suppress(Exception):  # the rank that imports it reports the error
        import torch._dynamo  # noqa: F401


def before_process_group(call: Callable[[], None]) -> bool:
    """Arrange that ``call`` is called before this process creates its first process group.

    Return False if this version of torch lacks the function that has to be wrapped.
    """
    from torch.distributed import distributed_c10d

    return _before_each(distributed_c10d, "_new_process_group_helper", functools.cache(call))


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> bool:
    """Replace a function by ``wrapper``, which gets the function as its first argument.

    Return False if this version of the library lacks the function.
    """
    if function := getattr(owner, name, None):

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(function, *args, **kwargs)

        setattr(owner, name, wrapped)
    return function is not None


def _before_each(module: Any, name: str, call: Callable[[], None]) -> bool:
    """Arrange that ``call`` is called before each call of a module's function. Return False if it does not exist."""

    def call_first(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call()
        return function(*args, **kwargs)

    return wrap(module, name, call_first)


def change_spawned(change: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
    """Arrange that torch.multiprocessing starts ``change(fn)`` in new processes in place of a function ``fn``."""
    package, spawn = map(importlib.import_module, ("torch.multiprocessing", "torch.multiprocessing.spawn"))
    wrap(spawn, "start_processes", lambda start, fn, *args, **kwargs: start(change(fn), *args, **kwargs))
    package.start_processes = spawn.start_processes  # type: ignore[attr-defined]


def before_steps(call: Callable[[Any], None]) -> None:
    """Arrange that ``call`` is called with the optimizer before each step of an optimizer in this process."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    # The hook is never removed: torch iterates over the hooks while it calls them, and a script may have hooks, too.
    register_optimizer_step_pre_hook(lambda stepped, *_: call(stepped))


def watch_batches(on_batch: Callable[[int, Any], None], on_end: Callable[[int], None]) -> None:
    """Call ``on_batch`` for each batch that a DataLoader returns, and ``on_end`` when it has returned all of them.

    The arguments are the number of the iteration over a DataLoader, and the indices of the batch's samples. In a
    version of torch that lacks the methods that have to be wrapped, nothing is called.
    """
    from torch.utils.data import dataloader

    base: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
    methods: list[Any] = [getattr(base, name, None) for name in ("_next_index", "__next__", "_reset")]
    next_index, take, reset = methods
    iterations = itertools.count()

    def note_index(self: Any) -> Any:
        self.__dict__.setdefault("_noted", deque()).append(indices := next_index(self))
        return indices

    def note_batch(self: Any) -> Any:
        number = self.__dict__.setdefault("_iteration", None)
        if number is None:
            number = self._iteration = next(iterations)
        try:
            data = take(self)
        except StopIteration:
            on_end(number)
            raise
        noted = self.__dict__.get("_noted")
        on_batch(number, noted.popleft() if noted else None)
        return data

    def note_reset(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__.pop("_noted", None)
        self._iteration = None
        reset(self, *args, **kwargs)

    if all(methods):
        base._next_index, base.__next__, base._reset = note_index, note_batch, note_reset


def before_rendezvous(check: Callable[[object, object, object], object]) -> None:
    """Arrange that init_process_group calls ``check`` with the URL, rank and world size before the rendezvous.

    ``check`` returns the URL at which the ranks meet.
    """
    from torch.distributed import distributed_c10d

    def check_first(meet: Any, url: Any, rank: Any = -1, world_size: Any = -1, **kwargs: Any) -> Any:
        return meet(check(url, rank, world_size), rank, world_size, **kwargs)

    wrap(distributed_c10d, "rendezvous", check_first)


def flight_recorder() -> bytes:
    """Return this process's records of collectives from torch's flight recorders, as a JSON object keyed by backend.

    The key "unrecorded" has the names of the backends whose collectives are not recorded. See docs/decisions/0054.
    """
    c10d, (hooked, unrecorded) = sys.modules.get("torch._C._distributed_c10d"), _other_backends()
    dumps = [b'"unrecorded":%s' % json.dumps(unrecorded).encode()]
    for backend, name, args in (
        ("gloo", "_dump_fr_trace_json", (True, False)),  # before torch 2.15, it does not take the name of a backend
        ("nccl", "_dump_nccl_trace_json", (True, False)),
        *((backend, "_dump_fr_trace_json", (True, False, backend)) for backend in hooked),
    ):
        with contextlib.suppress(Exception):  # in this torch the function has another signature or does not exist
            dumps.append(b'"%s":%s' % (backend.encode(), getattr(c10d, name)(*args)))
    return b"{%s}" % b",".join(dumps)


def _other_backends() -> tuple[list[str], list[str]]:
    """Return this process's backends that do not record their collectives themselves.

    The first list has those that torch's hook records. torch does not record those in the second list, or does not
    record when their collectives end.
    """
    hooked, unrecorded = set(), set()
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    for group, (name, _) in list(getattr(world, "pg_map", {}).items()):
        backends = [group._get_backend(device) for device in group._device_types]
        backends = [getattr(backend, "wrapped_pg", backend) for backend in backends]  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        others = {backend.name() for backend in backends if type(backend).__name__ not in SELF_RECORDING}
        hooks = getattr(world, "pg_flight_recorder_hooks", ())  # since torch 2.15
        seen = others & HOOKED if group in hooks else set()
        hooked |= seen
        unrecorded |= others - seen if backends else {name}
    return sorted(hooked), sorted(unrecorded - hooked)


def has_profiler() -> bool:
    """Return whether this process has a torch profiler that is ready to start or already runs."""
    module: Any = sys.modules["torch.autograd.profiler"]
    profiles = [owner for owner in gc.get_referrers(module.profile) if isinstance(owner, module.profile)]
    return module._is_profiler_enabled or any(each.entered and each.kineto_results is None for each in profiles)


def before_profiler(call: Callable[[], None]) -> None:
    """Arrange that ``call`` is called each time before a torch profiler is prepared or started in this process."""
    for name in ("_prepare_profiler", "_enable_profiler"):
        _before_each(sys.modules.get("torch.autograd.profiler"), name, call)


@contextlib.contextmanager
def profile_all_threads() -> Iterator[Any]:
    """Run torch's profiler for all threads. Record GPUs only if this process already uses CUDA."""
    torch: Any = sys.modules["torch"]
    device = "cuda" if torch.cuda.is_initialized() else None
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    recording = torch.autograd.profiler.profile(use_device=device, use_kineto=True, experimental_config=config)
    recording._prepare_trace()
    recording._start_trace()
    try:
        yield recording
    finally:
        # Otherwise it would synchronize with GPU 0, this thread's default, and use memory there.
        recording.use_device = None
        recording.__exit__(None, None, None)


def store_keys(store: Any) -> list[str] | None:
    """Return the keys in a store that this process serves, or None if this version of torch cannot list keys."""
    try:
        return list(store.list_keys())
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return None


def merge_files(files: Iterable[str]) -> list["Metric"]:
    """Return the sum of the metrics in prometheus_client's files. A damaged file raises prometheus_client's errors."""
    from prometheus_client.multiprocess import MultiProcessCollector

    return list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]


def file_base() -> type:
    """Return the C base class of all file objects, which is used to test whether an object is a file.

    A test against ``io.IOBase`` may run Python code of the object.
    """
    return getattr(getattr(io, "_io", None), "_IOBase", io.IOBase)
