"""The keeper as a zygote: a fork of ddprun with torch in it, so that a rank need only be forked.

ddprun imports torch before it has a thread, and forks; the fork imports the rest while ddprun meets the other nodes.
The imports happen in ddprun's environment, from which the ranks' is made: what Python and torch read at their start is
the same. So environment.py may set for one rank alone only what is read later. Nothing of CUDA may be touched before.

Importing torch starts no threads (2.15, tried) but those of numpy's OpenBLAS, which ends them itself before a fork.
"""

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from ddprun import keeper, processes
from ddprun.become import become
from ddpwire.exits import Exit

PLAIN_OPTIONS = ("-P", "-u")  # of the interpreter: what they do is done, or not done, for the ranks anew


class CannotForkError(Exception):
    """Why ddprun cannot be forked."""


def warm(num_threads: int) -> None:
    """Import torch as a rank would: its thread pools are of the size that they find in the environment."""
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    import torch.distributed  # noqa: F401

    if unset:
        del os.environ["OMP_NUM_THREADS"]


def fork(lock_fd: int, control: socket.socket) -> int:
    """Fork the keeper, which holds the node's lock and serves ``control``; its pid. Raises CannotForkError."""
    if threads := threading.enumerate()[1:]:
        raise CannotForkError(f"ddprun has threads ({', '.join(thread.name for thread in threads)})")
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        raise CannotForkError(f"ddprun cannot be forked: {error.strerror}") from None
    if pid == 0:
        try:
            _keep(parent, lock_fd, control)
        finally:
            os._exit(1)  # never back into ddprun's own frames
    return pid


def _keep(parent: int, lock_fd: int, control: socket.socket) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in keeper.NOT_FOR_US:  # blocked here; the ranks shall find them as Python does
        if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    first, second = sorted((lock_fd, control.fileno()))
    os.closerange(3, first)
    os.closerange(first + 1, second)
    os.closerange(second + 1, os.sysconf("SC_OPEN_MAX"))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    processes.die_with(parent)  # nobody listens to the control socket during the imports
    with contextlib.suppress(Exception):  # a rank that needs it will say why
        import torch._dynamo
        import torch.nn.parallel  # noqa: F401
    processes.die_with(None)
    gc.freeze()  # lest a collection in a rank copies every page
    keeper.serve(control, start)


def start(argv: Sequence[str], env: Mapping[str, str], cwd: str, cores: Sequence[int], output: int) -> tuple[int, str]:
    """Fork a rank that runs ``argv``, or execute it where a fork would not be the same; its pid, and why not."""
    reason = why_not(argv, cwd)
    if reason:
        return keeper.start(argv, env, cwd, cores, output)[0], reason
    keepers_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_rank(argv, env, cwd, cores, output, keepers_pid)
    return pid, ""


def _be_rank(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, cores: Sequence[int], output: int, keepers_pid: int
) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        keeper.settle(cwd, cores, output, keepers_pid)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        become(argv, env)
    except OSError as error:
        keeper.cannot_start(argv, error)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(Exit.SOFTWARE)  # never back into the keeper's own frames


def why_not(argv: Sequence[str], cwd: str) -> str:
    """Why a fork would not be what an execution is; empty where it would."""
    options = [*itertools.takewhile(lambda word: word.startswith("-") and word != "-m", sys.orig_argv[1:])]
    if {*options} - {*PLAIN_OPTIONS}:
        return f"ddprun's Python was started with options of its own ({' '.join(options)})"
    if threading.active_count() > 1:
        return f"an import has started threads ({', '.join(thread.name for thread in threading.enumerate()[1:])})"
    if any(path.startswith("/dev/nvidia") for path in _opened()):
        return "an import has opened the GPU"
    script = Path(cwd, argv[1])
    folder = Path(cwd) if argv[1] == "-m" else script if script.is_dir() else script.resolve().parent
    with contextlib.suppress(OSError):  # there is no such script: the rank will say so
        for path in sorted(folder.iterdir()):
            module = sys.modules.get(path.name.partition(".")[0])
            if module and module is not sys.modules["__main__"] and _is_module(path) and not _is_from(folder, module):
                return f"{path} would hide a module that is already imported"
    return ""


def _opened() -> list[str]:
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    return [str(link.readlink()) for link in links if link.is_symlink()]


def _is_module(path: Path) -> bool:
    return path.suffix in (".py", ".so") or (path / "__init__.py").is_file()


def _is_from(folder: Path, module: object) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).resolve().parents
