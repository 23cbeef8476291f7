"""Every private interface of CPython, torch and prometheus_client that ddprun uses, with a check and a fallback.

No library is imported before it is used: a process that is forked imports as little as it can.
"""

import atexit
import contextlib
import inspect
import io
import runpy
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

FORK_NAMES = ((runpy, "_run_module_as_main"), (threading, "_shutdown"), (atexit, "_run_exitfuncs"))

WRITE_PARAMETERS = ["self", "key", "value", "timestamp"]  # of MmapedDict.write_value


def missing_for_fork() -> str:
    """Return what this Python lacks for a forked rank to behave as an executed one; empty: nothing.

    The fallback is to execute ranks.
    """
    return ", ".join(f"{module.__name__}.{name}" for module, name in FORK_NAMES if not hasattr(module, name))


def run_module_as_main(name: str, *, alter_argv: bool = True) -> None:
    """Run a module, a folder or a zip file as ``__main__``, as CPython's pymain_run_module does."""
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def finalizers() -> Sequence[Callable[[], object]]:
    """Return what Py_FinalizeEx calls first: join the threads, then call the exit functions."""
    return threading._shutdown, atexit._run_exitfuncs  # type: ignore[attr-defined]


def import_dynamo() -> None:
    """Import torch._dynamo, which takes a rank a second when it needs it. The fallback: each rank imports it."""
    with contextlib.suppress(Exception):  # a rank that needs it reports the error
        import torch._dynamo  # noqa: F401


def before_process_group(call: Callable[[], None]) -> bool:
    """Call ``call`` before this process makes its first process group, of whatever kind.

    Return False where this torch has no place to learn it from. The fallback: it is not known.
    """
    from torch.distributed import distributed_c10d

    make_group: Any = getattr(distributed_c10d, "_new_process_group_helper", None)
    if make_group is None:
        return False

    def make_first_group(*args: Any, **kwargs: Any) -> Any:
        distributed_c10d._new_process_group_helper = make_group
        call()
        return make_group(*args, **kwargs)

    distributed_c10d._new_process_group_helper = make_first_group
    return True


def before_rendezvous(check: Callable[[object, object, object], None]) -> None:
    """Call ``check`` with the URL, rank and world size before this process meets others in init_process_group.

    The fallback, where this torch has no place for it: it is not called.
    """
    from torch.distributed import distributed_c10d

    meet: Any = getattr(distributed_c10d, "rendezvous", None)
    if meet is None:
        return

    def check_first(url: Any, rank: Any = -1, world_size: Any = -1, **kwargs: Any) -> Any:
        check(url, rank, world_size)
        return meet(url, rank, world_size, **kwargs)

    distributed_c10d.rendezvous = check_first  # type: ignore[attr-defined]


def flight_recorder() -> bytes:
    """Return torch's record of the collectives of this process, as JSON by backend; the fallback: of no backend."""
    c10d = sys.modules.get("torch._C._distributed_c10d")
    found = []
    for backend, name, args in (
        ("gloo", "_dump_fr_trace_json", (True, False, "gloo")),
        ("nccl", "_dump_nccl_trace_json", (True, False)),
    ):
        with contextlib.suppress(Exception):  # this torch has another signature, or none of this backend
            found.append(b'"%s":%s' % (backend.encode(), getattr(c10d, name)(*args)))
    return b"{%s}" % b",".join(found)


def store_keys(store: Any) -> list[str] | None:
    """Return the keys in a store that this process serves; None: this torch does not list them."""
    try:
        return list(store.list_keys())
    except (AttributeError, RuntimeError):  # NotImplementedError is a RuntimeError
        return None


def merge_files(files: Iterable[str], *, accumulate: bool = True) -> list["Metric"]:
    """Return the metrics in prometheus_client's files of one process each, added up. Raises its errors if torn."""
    from prometheus_client.multiprocess import MultiProcessCollector

    return list(MultiProcessCollector.merge(files, accumulate=accumulate))  # type: ignore[no-untyped-call]


def write_merged(metrics: Iterable["Metric"], path: Path) -> bool:
    """Write metrics into a file in prometheus_client's format, which exists with enough zero bytes.

    Return False where this version's format is not known. The fallback is to leave the files unmerged: they are read
    one by one at each scrape.
    """
    from prometheus_client import mmap_dict

    mmap_key: Any = getattr(mmap_dict, "mmap_key", None)
    write = getattr(mmap_dict.MmapedDict, "write_value", None)
    if mmap_key is None or write is None or [*inspect.signature(write).parameters] != WRITE_PARAMETERS:
        return False
    kept: Any = mmap_dict.MmapedDict(str(path))  # type: ignore[no-untyped-call]
    for metric in metrics:
        for sample in metric.samples:
            labels = sample.labels
            key = mmap_key(metric.name, sample.name, list(labels), list(labels.values()), metric.documentation)
            kept.write_value(key, sample.value, 0.0)
    kept.close()
    return True


def file_base() -> type:
    """Return the base class of all files. ``io.IOBase`` would ask each object for its class, which may run its code."""
    return getattr(getattr(io, "_io", None), "_IOBase", io.IOBase)
