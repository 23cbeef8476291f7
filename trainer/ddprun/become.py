"""How a fork of the zygote becomes ``python script.py``: what an interpreter does between its start and its end.

It follows CPython's pymain_run_python and Py_FinalizeEx; tests/ddprun/test_zygote.py holds it to what ``python`` prints
and exits with. One wilful difference: at the end the process leaves with os._exit, so that no C++ destructor runs (of
32 gloo processes that went through them 7 aborted). Nor is ``__del__`` called of what is still alive, which Python does
not promise either.
"""

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import os
import pkgutil
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from ddprun import processes


def become(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Be the interpreter that ``argv`` would have started, to its very end."""
    os.environ.clear()
    os.environ.update(env)
    _, *words = argv
    if words[0] != "-m" and (words[0].endswith(".pyc") or not os.access(words[0], os.R_OK)):
        os.execve(argv[0], list(argv), env)  # noqa: S606 (the interpreter itself knows what to say)
    sys.orig_argv = list(argv)
    if not sys.flags.safe_path:
        del sys.path[0]  # ddprun's own
    _fresh_streams()
    _fresh_state(env)
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    safe = bool(env.get("PYTHONSAFEPATH"))  # -P is ddprun's own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = _run(lambda: _run_module(words[1:], safe) if words[0] == "-m" else _run_script(words, safe))
    _leave(code)


def _run_module(words: Sequence[str], safe: bool) -> None:
    sys.argv = ["-m", *words[1:]]
    if not safe:
        sys.path.insert(0, str(Path.cwd()))
    _fresh_main()
    runpy._run_module_as_main(words[0])  # type: ignore[attr-defined]


def _run_script(words: Sequence[str], safe: bool) -> None:
    sys.argv = list(words)
    script = os.path.join(Path.cwd(), words[0])  # noqa: PTH118 (as it is in tracebacks: not normalised)
    if pkgutil.get_importer(script) is not None:  # a folder or a zip file
        sys.path.insert(0, script)
        _fresh_main()
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not safe:
        sys.path.insert(0, str(Path(script).resolve().parent))
    main = _fresh_main()
    main.__dict__.update(__file__=script, __cached__=None, __loader__=SourceFileLoader("__main__", script))
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _fresh_main() -> ModuleType:
    """An empty ``__main__``, as pickle and multiprocessing look for it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    importlib.invalidate_caches()
    return main


def _fresh_streams() -> None:
    """Streams as Python makes them on a pipe under PYTHONUNBUFFERED, which ddprun sets: those of ddprun may differ."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__")
        raw = io.FileIO(descriptor, mode, closefd=False)
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(
            io.BufferedReader(raw) if mode == "r" else raw,
            encoding=getattr(old, "encoding", "utf-8"),
            errors=getattr(old, "errors", "strict"),
            newline="\n",
            write_through=True,
        )
        text.mode = mode  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _fresh_state(env: Mapping[str, str]) -> None:
    """What a new process would have drawn or read for itself. Python's own ``random`` sees to itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if multiprocessing := sys.modules.get("multiprocessing"):
        multiprocessing.current_process().authkey = os.urandom(32)
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # new for each process; those of the GPUs begin with a fixed one, and still do
        threads = env.get("OMP_NUM_THREADS", "")
        if threads.isdecimal() and int(threads) not in (0, torch.get_num_threads()):
            torch.set_num_threads(int(threads))


def _run(main: Callable[[], None]) -> int:
    """What ``main`` ends with; below 0 the signal to die of."""
    uncaught = None
    try:
        main()
    except BaseException as error:
        uncaught = error
    code = _report(uncaught) if uncaught else 0
    for last in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            last()
        except BaseException as error:  # Ctrl-C while threads are joined
            where = f"Exception ignored in: {sys.modules[last.__module__]!r}\nTraceback (most recent call last):\n"
            frames = "".join(traceback.format_tb(_scripts_own(error)))
            print(f"{where}{frames}{type(error).__name__}: {error}", file=sys.stderr)
    return code


def _report(error: BaseException) -> int:
    """Show what nobody caught as Python does; the exit code that it means."""
    if isinstance(error, SystemExit):
        return _code(error.code)
    frames = _scripts_own(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit as leaving:
        return _code(leaving.code)
    except BaseException as nested:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(nested), nested, _scripts_own(nested))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, frames)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _scripts_own(error: BaseException) -> TracebackType | None:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error.__traceback__ = frames
    return frames


def _code(said: object) -> int:
    if said is None:
        return 0
    if isinstance(said, int):
        return said & 0xFF
    print(said, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    for thing in gc.get_objects():
        if issubclass(type(thing), io._io._IOBase):  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):  # it is closed
                thing.flush()  # a file that the script left open
    if processes.LIBC:
        processes.LIBC.fflush(None)  # what C has printed
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
