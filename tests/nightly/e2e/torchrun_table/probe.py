"""One rank: what a script sees of its start, its process, its environment, its streams and of torch."""

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib.metadata
import inspect
import linecache
import locale
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

import facts
from facts import fact

DRAWS = {}
PARENT = os.getppid()
SEEN = ("torch", "torch._dynamo", "numpy", "ddprun", "prometheus_client")
ONE_BY_ONE = (
    "RANK",
    "WORLD_SIZE",
    "OMP_NUM_THREADS",
    "MASTER_ADDR",
    "ROLE_NAME",
    "PET_NNODES",
    "EXTRA",
    "PYTHONHASHSEED",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)
PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "TORCH_NCCL_", "MASTER_")
OF_A_RUN = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "OMP_NUM_THREADS")
GIVEN = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "PYTHONPATH", "PWD")


class Thing:
    """Is pickled."""


def source_of_thing() -> str:
    return inspect.getsource(Thing)


def descriptors() -> list[str]:
    paths = [path for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2]
    return sorted(kind(path.name) for path in paths if path.is_symlink())


def kind(descriptor: int | str) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).partition(":")[0]


def of_the_start() -> None:
    fact("sys.argv", lambda: sys.argv)
    fact("`__name__`", lambda: __name__)
    fact("`__file__`", lambda: __file__)
    fact("`__package__`, `__spec__`", lambda: [__package__, __spec__])
    fact("`__loader__`", lambda: type(__loader__).__name__)
    fact("sys.path[0]", lambda: sys.path[0])
    fact("modules at the start", lambda: [name for name in SEEN if name in facts.AT_START])
    fact("descriptors above 2", descriptors)
    fact("threads of the process", lambda: len(os.listdir("/proc/self/task")))  # noqa: PTH208
    fact("threading.enumerate()", lambda: [thread.name for thread in threading.enumerate()])
    fact("sys.orig_argv", lambda: sys.orig_argv)
    fact("sys.path[1:]", lambda: sys.path[1:])
    fact("sys.flags", lambda: str(sys.flags))
    fact("sys.warnoptions", lambda: sys.warnoptions)
    fact("sys._xoptions", lambda: sys._xoptions)
    fact("sys.executable, sys.prefix", lambda: [sys.executable, sys.prefix])
    fact("the current folder", os.getcwd)
    fact("names in `__main__`", lambda: sorted(name for name in globals() if name.startswith("__")))
    fact("sys.modules['__main__'] is the script", lambda: sys.modules["__main__"].__dict__ is globals())
    fact("sys.excepthook is Python's", lambda: sys.excepthook is sys.__excepthook__)
    fact("sys.breakpointhook is Python's", lambda: sys.breakpointhook is sys.__breakpointhook__)
    fact("threading.excepthook is Python's", lambda: threading.excepthook is threading.__excepthook__)
    fact("sys.gettrace(), sys.getprofile()", lambda: [sys.gettrace(), sys.getprofile()])
    fact("sys.getrecursionlimit()", sys.getrecursionlimit)
    fact("sys.getswitchinterval()", sys.getswitchinterval)
    fact("sitecustomize of PYTHONPATH is run", lambda: builtins.customized)
    fact("site-packages are in sys.path", lambda: any(path.endswith("site-packages") for path in sys.path))
    fact("atexit callbacks at the start", atexit._ncallbacks)
    fact("sys.meta_path", lambda: [getattr(entry, "__name__", type(entry).__name__) for entry in sys.meta_path])


def of_the_process() -> None:
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGXFSZ", "SIGCHLD", "SIGUSR1", "SIGUSR2"):
        handler = signal.getsignal(signal.Signals[name])
        fact(f"handler of {name}", lambda handler=handler: getattr(handler, "name", getattr(handler, "__name__", "?")))
    fact("signal mask", lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    fact("signal wake-up descriptor", lambda: signal.set_wakeup_fd(-1))
    fact("in the launcher's process group", lambda: os.getpgrp() == os.getpgid(PARENT))
    fact("leader of its process group", lambda: os.getpgrp() == os.getpid())
    fact("in its parent's session", lambda: os.getsid(0) == os.getsid(PARENT))
    fact("its parent is alive", lambda: PARENT > 1 and os.getppid() == PARENT)
    fact("its parent is the launcher", lambda: int(os.environ["LAUNCHER_PID"]) == PARENT)
    fact("signal at the parent's death", parent_death_signal)
    fact(
        "resource limits",
        lambda: [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
    )
    fact("umask", lambda: oct(os.umask(0o22)))
    fact("nice", lambda: os.nice(0))
    fact("runs on the cores of its parent", lambda: os.sched_getaffinity(0) == os.sched_getaffinity(PARENT))
    scores = [Path(f"/proc/{pid}/oom_score_adj") for pid in ("self", os.environ["LAUNCHER_PID"])]
    fact("oom_score_adj is the same as the launcher's", lambda: scores[0].read_text() == scores[1].read_text())
    fact("gc.isenabled()", gc.isenabled)
    fact("gc.get_threshold()", gc.get_threshold)
    fact("gc.get_freeze_count() > 0", lambda: gc.get_freeze_count() > 0)
    fact("gc.get_debug(), gc.callbacks", lambda: [gc.get_debug(), gc.callbacks])
    fact("faulthandler.is_enabled()", faulthandler.is_enabled)
    fact("multiprocessing start method", multiprocessing.get_start_method)
    fact("multiprocessing process", lambda: multiprocessing.current_process().name)
    fact("multiprocessing parent_process()", multiprocessing.parent_process)
    fact("threading.stack_size()", threading.stack_size)


def parent_death_signal() -> int:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(number))
    return number.value


def of_the_environment() -> None:
    names = {*ONE_BY_ONE, *(name for name in os.environ if name.startswith(PREFIXES))}
    for name in sorted(names):
        value = os.environ.get(name, "not set")
        is_port_or_so = name in OF_A_RUN and value not in ("not set", "none")
        fact(f"{name}", lambda value="set" if is_port_or_so else value: value)
    fact("further variables", lambda: sorted({*os.environ} - names - {*GIVEN, "LAUNCHER_PID"}))
    fact("PATH, HOME and other variables of the launcher", lambda: {name: os.environ.get(name) for name in GIVEN})
    fact("RANK in a child process", lambda: os.popen("echo $RANK").read())  # noqa: S605
    fact("locale.getpreferredencoding()", lambda: locale.getpreferredencoding(do_setlocale=False))
    fact("locale.setlocale(LC_ALL)", lambda: locale.setlocale(locale.LC_ALL))
    fact("sys.getfilesystemencoding()", sys.getfilesystemencoding)
    fact("tempfile.gettempdir() is TMPDIR", lambda: tempfile.gettempdir() == os.environ["TMPDIR"])


def of_the_streams() -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        name = stream.name.strip("<>")
        fact(f"{name}.isatty()", stream.isatty)
        fact(
            f"{name} is",
            lambda stream=stream: kind(stream.fileno()),
        )
        fact(f"{name}'s encoding, errors", lambda stream=stream: [stream.encoding, stream.errors])
        fact(f"{name}'s newline, mode", lambda stream=stream: [stream.newlines, stream.mode])
        buffering = [stream.line_buffering, stream.write_through, type(stream.buffer).__name__]
        fact(f"{name}'s line buffering, write-through, buffer", lambda buffering=buffering: buffering)
        fact(f"sys.__{name}__ is sys.{name}", lambda stream=stream, name=name: getattr(sys, f"__{name}__") is stream)
    answer = 41
    fact("a variable after breakpoint(), which reads commands from stdin", lambda: breakpoint() or answer)  # noqa: T100
    fact("input()", input)
    fact("sys.stdin.read()", sys.stdin.read)
    fact("sys.stdin.read() at the end", sys.stdin.read)


def of_the_library() -> None:
    fact("importlib.metadata finds torch", lambda: bool(importlib.metadata.version("torch")))
    fact("inspect.getsource() of a class of the script", source_of_thing)
    fact("linecache of the script", lambda: linecache.getline(__file__, 1))
    fact(
        "how often a pickle names `__main__`; the copy has the same class",
        lambda: [pickle.dumps(Thing()).count(b"__main__"), type(copy(Thing())) is Thing],
    )
    fact("traceback.format_exc()", text_of_traceback)
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(2):
            warnings.warn("again", stacklevel=1)
    fact("how often a warning in a loop is shown", lambda: len(caught))
    fact("warnings.filters", lambda: [str(entry) for entry in warnings.filters])
    fact("handlers of the root logger", lambda: [str(handler) for handler in logging.getLogger().handlers])
    fact("level of the root logger", lambda: logging.getLogger().level)
    logging.getLogger("script").warning("logged")
    print("to stdout")
    print("to stderr", file=sys.stderr)
    warnings.warn("a warning", stacklevel=1)


def copy(thing: object) -> object:
    return pickle.loads(pickle.dumps(thing))  # noqa: S301


def text_of_traceback() -> str:
    try:
        return str({}["key"])
    except KeyError:
        return traceback.format_exc()


def of_torch() -> None:
    DRAWS["random.random()"] = random.random()
    DRAWS["os.urandom()"] = os.urandom(8).hex()
    DRAWS["multiprocessing's authkey"] = multiprocessing.current_process().authkey.hex()
    DRAWS["tempfile.mktemp()"] = next(tempfile._get_candidate_names())
    import numpy
    import torch
    import torch.distributed as dist

    DRAWS["numpy.random.rand()"] = float(numpy.random.rand())
    DRAWS["numpy.random.default_rng()"] = float(numpy.random.default_rng().random())
    fact(
        "torch.initial_seed() is the seed of the default generator",
        lambda: torch.initial_seed() == torch.random.default_generator.initial_seed(),
    )
    fact("torch.manual_seed(7); torch.rand(1)", lambda: (torch.manual_seed(7), torch.rand(1).item())[1])
    fact("torch.get_default_dtype(), device", lambda: [torch.get_default_dtype(), torch.get_default_device()])
    fact(
        "torch.is_grad_enabled(), deterministic",
        lambda: [torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()],
    )
    fact("torch.cuda.is_initialized()", torch.cuda.is_initialized)
    fact("dist.is_initialized()", dist.is_initialized)
    fact("dist.is_torchelastic_launched()", dist.is_torchelastic_launched)
    fact("torch.multiprocessing sharing strategy", torch.multiprocessing.get_sharing_strategy)
    fact("torch.utils.data.get_worker_info()", torch.utils.data.get_worker_info)
    fact(
        "handlers of the logger torch",
        lambda: [type(handler).__name__ for handler in logging.getLogger("torch").handlers],
    )
    fact("signal handler of SIGCHLD after import torch", lambda: str(signal.getsignal(signal.SIGCHLD)))


if __name__ == "__main__":
    of_the_start()
    of_the_process()
    of_the_environment()
    of_the_streams()
    of_the_library()
    of_torch()
    DRAWS["hash('a')"] = hash("a")
    facts.FACTS["draws"] = DRAWS
    facts.save()
    sys.exit(0)
