"""The supervisor as a fork server: it has already imported torch, and starts each rank with a fork.

ddprun imports torch and forks the supervisor before it starts threads. The supervisor imports further modules while
ddprun connects to the other nodes. Some environment variables are read when Python starts or when torch is
imported. All ranks share the values of these variables. Other variables may differ between ranks (rank_environment.py).
CUDA must not be initialized before the fork.

The import of torch (tested with 2.15) starts only threads of OpenBLAS, and OpenBLAS ends them before a fork.
"""

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import itertools
import os
import pkgutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import BuiltinImporter, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from ddprank.resume import record_resume
from ddprun.ranks import supervisor
from ddprun.ranks.process_groups import record_process_group, watch_process_groups
from ddprun.ranks.rank_server import offer_stacks
from ddprun.settings.script_environment import is_read_later, may_train, set_before_torch
from ddprun.system import compat, processes
from ddpwire import names
from ddpwire.exits import Exit
from ddpwire.run_files import write_error


class CannotForkError(Exception):
    """ddprun cannot be forked. The message gives the reason."""


def preload_torch(num_threads: int) -> None:
    """Import torch. It uses ``num_threads`` threads, unless OMP_NUM_THREADS sets another number."""
    unset = "OMP_NUM_THREADS" not in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # OpenMP reads it only once, when torch loads it
    with _frozen_objects():
        import torch.distributed  # noqa: F401

    if unset:  # a variable that is set counts as the user's choice (rank_environment.py)
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _frozen_objects() -> Iterator[None]:
    """Collect no garbage in the block, and freeze all objects at its end.

    Garbage collections take 13 % of an import. Without the freeze, a garbage collection in a rank would copy all shared
    memory pages.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def fork_supervisor(lock_fd: int, control: socket.socket, argv: Sequence[str]) -> int:
    """Fork the supervisor, which holds the lock and serves ``control``. Return its pid. Raises CannotForkError.

    ``argv`` is what the ranks will run. It only decides what the supervisor imports for them.
    """
    # A fork copies only the calling thread. Locks that other threads hold would stay locked in the child.
    if threads := threading.enumerate()[1:]:
        raise CannotForkError(f"ddprun has threads ({', '.join(thread.name for thread in threads)})")
    try:
        return processes.fork(partial(_run_supervisor, lock_fd, control, argv))
    except OSError as error:
        raise CannotForkError(f"ddprun cannot be forked: {error.strerror}") from None


def _run_supervisor(lock_fd: int, control: socket.socket, argv: Sequence[str]) -> None:
    os.setsid()  # so that neither a terminal nor a signal to ddprun's process group reaches it
    # The fork has copied ddprun's handlers and its wake-up descriptor, through which a signal here would reach ddprun.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGWINCH, signal.SIG_DFL)  # ddprun handles it, and it is not among those that are blocked
    for number in supervisor.BLOCKED_SIGNALS:  # blocked in the supervisor; ranks get Python's default handlers
        # What the user ignores (nohup) stays ignored. SIGUSR1 and 2 are ignored by ddprun's own start (__main__.py).
        if signal.getsignal(number) != signal.SIG_IGN or number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The node's lock stays held until the supervisor ends. Among the others is ddprun's end of ``control``: while a
    # copy is open, the supervisor reads no end of file.
    processes.close_descriptors(lock_fd, control.fileno())
    # As for an executed supervisor (workers.py): only a rank may read from the terminal.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with _frozen_objects():
        # Only if a rank may need it, as it is slow. The source of a module (-m) may be in an installed package.
        if argv[1] == "-m" or may_train(_source(argv, str(Path.cwd()))):
            compat.import_dynamo()
        with contextlib.suppress(Exception):  # the rank that imports it reports the error
            import torch.nn.parallel  # noqa: F401
    # Until here, the supervisor would not have noticed that ddprun ended. From here on, it must outlive ddprun: at the
    # end of file of ``control``, it kills all descendants. The kernel would kill only the ranks (docs/decisions/0002).
    processes.die_with_parent(None)
    supervisor.Supervisor(control, fork_rank).run()


def fork_rank(request: supervisor.Request, streams: Sequence[int]) -> tuple[int, str]:
    """Fork a rank. If there is an obstacle, execute its command in a new process instead.

    Return the rank's pid, and the obstacle or "".
    """
    if reason := fork_obstacle(request["argv"], request["cwd"]):
        return supervisor.exec_rank(request, streams)[0], reason
    supervisor_pid = os.getpid()  # before the fork: the rank compares it with its parent (die_with_parent)
    pid = os.fork()
    if pid == 0:
        _run_rank(request, streams, supervisor_pid)
    return pid, ""


def _run_rank(request: supervisor.Request, streams: Sequence[int], supervisor_pid: int) -> NoReturn:
    try:
        # The fork has copied these from the supervisor, which the rank's signals must not wake.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        threading.excepthook = threading.__excepthook__  # ddprun's own hook would end the node
        supervisor.set_up_rank(request, streams, supervisor_pid)  # first: it copies the streams to 0, 1 and 2
        processes.close_descriptors()  # the node's lock, the supervisor's sockets
        run_python(request["argv"], request["env"])
    except OSError as error:  # as of an executed rank, such as a folder that does not exist
        supervisor.exit_not_started(request["argv"], error)
    except BaseException:  # an error of ddprun: run_python itself handles those of the script
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(Exit.SOFTWARE)  # never return to the supervisor's code


def fork_obstacle(argv: Sequence[str], cwd: str) -> str:
    """Return why a forked rank would differ from an executed one, or an empty string if both would behave alike."""
    if missing := compat.missing_for_fork():
        return f"this Python has no {missing}"
    # orig_argv, because Python removes its own options from argv. They end at -m or at a file: ddprun itself.
    options = [*itertools.takewhile(lambda word: word.startswith("-") and word != "-m", sys.orig_argv[1:])]
    if {*options} - {"-P", "-u"}:  # these do not change how the script runs
        return f"ddprun's Python was started with options ({' '.join(options)})"
    if threading.active_count() > 1:
        return f"an import has started threads ({', '.join(thread.name for thread in threading.enumerate()[1:])})"
    # The descriptor of the listing itself is closed by now, so it is no link any more.
    links = (Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    # CUDA cannot be used in a child of a process that has initialized it.
    if any(str(link.readlink()).startswith("/dev/nvidia") for link in links if link.is_symlink()):
        return "an import has opened the GPU"
    script = Path(cwd, argv[1])
    folder = Path(cwd) if argv[1] == "-m" else script if script.is_dir() else script.resolve().parent
    # In a forked rank, such a variable would have no effect, because torch is imported already.
    if variables := set_before_torch(_source(argv, cwd), folder):
        return f"the script sets {', '.join(variables)} before it imports torch"
    with contextlib.suppress(OSError):  # there is no such script: the rank reports it
        for path in sorted(folder.iterdir()):
            module = sys.modules.get(path.name.partition(".")[0])
            file = getattr(module, "__file__", None)
            # The script would get this module instead of its own file.
            is_own = module is sys.modules["__main__"] or (file and folder in Path(file).resolve().parents)
            if module and not is_own and (path.suffix in (".py", ".so") or (path / "__init__.py").is_file()):
                return f"{path} has the name of a module that is already imported"
    return ""


def _source(argv: Sequence[str], cwd: str) -> Path:
    """Return the file that the rank runs as ``__main__``.

    If the rank runs a module that is not in ``cwd``, the returned file does not exist.
    """
    if argv[1] != "-m":
        script = Path(cwd, argv[1])
        return script / "__main__.py" if script.is_dir() else script.resolve()
    place = Path(cwd, *argv[2].split("."))
    return place / "__main__.py" if place.is_dir() else place.with_name(f"{place.name}.py")


# ---- Running a forked rank like ``python script.py``
#
# This follows CPython's pymain_run_python and Py_FinalizeEx. tests/nightly/ddprun/test_fork_server.py compares output
# and exit code with those of ``python``. One difference is intended: the process ends with os._exit, so that no C++
# destructors run (they aborted 7 of 32 processes that used gloo) and ``__del__`` is not called on objects that are
# still alive. Python does not guarantee this call either.


def run_python(argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run ``argv`` as a new Python interpreter would, with the environment ``env``, and end this process."""
    os.environ.clear()  # the supervisor's may have variables that the rank's lack
    os.environ.update(env)
    _, *arguments = argv
    # _run_script compiles source code, which a .pyc file is not. If a file cannot be read, the interpreter reports the
    # error itself.
    if arguments[0] != "-m" and (arguments[0].endswith(".pyc") or not os.access(arguments[0], os.R_OK)):
        os.execve(argv[0], supervisor.unbuffered(argv), env)  # noqa: S606 (the command is the user's)
    sys.orig_argv = supervisor.unbuffered(argv)
    if not sys.flags.safe_path:  # with it (-P), Python has made no such entry
        del sys.path[0]  # the entry for ddprun
    _reopen_streams()
    _reset_state(env)
    if env.get("PYTHONFAULTHANDLER"):  # Python has read it at its start, from ddprun's environment
        faulthandler.enable()
    offer_stacks(env)
    safe = bool(env.get("PYTHONSAFEPATH"))  # the option -P applies only to ddprun
    # Until here, SIGINT has ended the process without a traceback (set_up_rank), as while Python starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record_process_group(env)
    watch_process_groups(env)
    # Before the script, because they wrap functions that it calls.
    if record := record_resume(env):
        compat.before_steps(record.before_step)
    observer = None
    if names.REHEARSAL in env:  # the import is only for a rehearsal
        from ddprun.ranks.observer import observe

        observer = observe(env)
    if "torch" in sys.modules:  # last: what is above may import torch, which would count as the script's import
        FirstTorchImport().install()
    code, uncaught = _run_main(lambda: _run_script(arguments, safe))
    # Otherwise a handler could still run. The signal with which _exit ends the process, if any, stays unblocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {-code})
    # Now, because the script's threads and atexit functions have ended.
    if observer:
        observer.end(code)
    if uncaught:
        write_error(describe_uncaught(uncaught), env)
    _exit(code)


def _run_script(arguments: Sequence[str], safe: bool) -> None:
    if arguments[0] == "-m":
        sys.argv = ["-m", *arguments[2:]]  # run_module_as_main replaces the first word by the module's file
        if not safe:
            sys.path.insert(0, str(Path.cwd()))
        _new_main()
        compat.run_module_as_main(arguments[1])
        return
    sys.argv = list(arguments)
    script = os.path.join(Path.cwd(), arguments[0])  # noqa: PTH118 (as it is in tracebacks: not normalized)
    if pkgutil.get_importer(script) is not None:  # a folder or a zip file
        sys.path.insert(0, script)
        _new_main()
        compat.run_module_as_main("__main__", alter_argv=False)  # sys.argv[0] stays the folder, as with ``python``
        return
    if not safe:
        sys.path.insert(0, str(Path(script).resolve().parent))
    main = _new_main()
    main.__dict__.update(__file__=script, __cached__=None, __loader__=SourceFileLoader("__main__", script))
    exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _new_main() -> ModuleType:
    """Replace the module ``__main__`` in sys.modules by an empty one, and return it."""
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=BuiltinImporter)
    sys.modules["__main__"] = main
    importlib.invalidate_caches()  # folders may have changed since the supervisor listed them
    return main


def _reopen_streams() -> None:
    """Replace sys.stdin, stdout and stderr by streams like those of ``python -u``.

    An executed rank has such streams, because it is started with ``-u``. Names and modes are those that CPython's
    create_stdio sets. The old streams have the encoding that this Python chose at its start.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        old = getattr(sys, f"__{name}__")
        raw = io.FileIO(descriptor, mode, closefd=False)  # the old stream still has the descriptor
        raw.name = f"<{name}>"
        text = io.TextIOWrapper(
            io.BufferedReader(raw) if mode == "r" else raw,
            encoding=getattr(old, "encoding", "utf-8"),
            errors=getattr(old, "errors", "strict"),
            newline="\n",
            write_through=True,  # a killed rank loses no output
        )
        text.mode = mode  # type: ignore[misc]
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)


def _reset_state(env: Mapping[str, str]) -> None:
    """Reset what a new Python process would seed or read at its start. The module ``random`` does this itself."""
    # Otherwise all ranks would draw the same numbers, and share a key and a folder that the supervisor has chosen.
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if multiprocessing := sys.modules.get("multiprocessing"):
        multiprocessing.current_process().authkey = os.urandom(32)
    if tempfile := sys.modules.get("tempfile"):
        tempfile.tempdir = None  # type: ignore[attr-defined]  # the script may set TMPDIR
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()  # random in each process; those of GPUs are made after the fork
        threads = env.get("OMP_NUM_THREADS", "")
        # set_num_threads takes one number, and refuses 0. The variable may also be a list.
        if threads.isdecimal() and int(threads) not in (0, torch.get_num_threads()):
            torch.set_num_threads(int(threads))


def _run_main(main: Callable[[], None]) -> tuple[int, BaseException | None]:
    uncaught = None
    try:
        main()
    except BaseException as error:
        uncaught = error
    try:
        code = _report_uncaught(uncaught) if uncaught else 0
    except SystemExit as second:  # raised by a signal handler: both Slurm and ddprun signal each process
        code = _exit_code(second.code)
    for last in compat.finalizers():  # os._exit calls none; Python goes on after an error in one
        try:
            last()
        except BaseException as error:  # Ctrl-C while threads are joined
            where = f"Exception ignored in: {sys.modules[last.__module__]!r}\nTraceback (most recent call last):\n"
            frames = "".join(traceback.format_tb(_script_traceback(error)))
            print(f"{where}{frames}{type(error).__name__}: {error}", file=sys.stderr)
    return code, uncaught


def _report_uncaught(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return _exit_code(error.code)
    frames = _script_traceback(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames  # for pdb.pm()
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit as leaving:
        return _exit_code(leaving.code)
    except BaseException as nested:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(nested), nested, _script_traceback(nested))
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, frames)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1  # Python also ends by the signal itself


def describe_uncaught(error: BaseException) -> str:
    """Return an uncaught exception as Python prints it (``ValueError: bad label 17``), or "" for a plain exit.

    If the script exits while it handles an exception, return that exception's description. A text of
    SystemExit comes first.
    """
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            return str(error.code)
        handled = error.__context__  # as in hydra, which prints an exception and exits
        return describe_uncaught(handled) if handled and not error.__suppress_context__ else ""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    name = f"{module}{kind.__qualname__}"
    try:
        text = str(error).strip()
    except Exception:  # its __str__ is code of the script
        text = ""
    if isinstance(error, BaseExceptionGroup):
        text = f"{text}: {describe_uncaught(error.exceptions[0])}"  # the first stands for all
    return f"{name}: {text}" if text else name


def _script_traceback(error: BaseException) -> TracebackType | None:
    """Remove the frames of ddprun, which the traceback of an executed script does not have.

    The exception itself changes, too: sys.excepthook prints its traceback, not the one in the argument.
    """
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename in (__file__, compat.__file__):  # the outer frames come first
        frames = frames.tb_next
    error.__traceback__ = frames
    return frames


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF  # as the kernel does with it; here, a negative code means a signal
    print(value, file=sys.stderr)
    return 1


def _exit(code: int) -> NoReturn:
    for instance in gc.get_objects():  # os._exit flushes no file
        if issubclass(type(instance), compat.file_base()):
            with contextlib.suppress(Exception):  # it is closed
                instance.flush()  # a file that the script left open
    if processes.LIBC:
        processes.LIBC.fflush(None)  # output that C code has buffered
    if code < 0:  # as Python does, so that a shell or ddprun sees the signal
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


class FirstTorchImport(MetaPathFinder, Loader):
    """Handles a script's first import of torch in a forked rank, which has imported torch before the fork.

    This finder removes torch from sys.modules, so that the script finds the same modules as after exec. When the script
    imports torch, the finder puts torch's modules back. By then, code that script_environment.py does not read (an
    installed package) may have set variables that torch reads during its import. They have no effect in a forked rank,
    so ddprun prints their names.
    """

    def __init__(self) -> None:
        self._modules = {name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == "torch"}
        self._environ = dict(os.environ)  # to find what changes until the import
        self._is_used = False
        self._spec: ModuleSpec = self._modules["torch"].__spec__  # type: ignore[assignment]

    def install(self) -> None:
        """Remove torch from sys.modules until the script imports it. torch must be in sys.modules before this call."""
        for name in self._modules:
            del sys.modules[name]
        sys.meta_path.insert(0, self)  # before the finder of files, which would import torch again

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Return a spec for torch. Its submodules need none, because create_module puts them back into sys.modules."""
        if fullname != "torch" or self._is_used:  # used, but still asked: the script has wrapped the finders
            return None
        real = self._spec
        spec = ModuleSpec(fullname, self, origin=real.origin, is_package=True)
        spec.submodule_search_locations = [*(real.submodule_search_locations or ())]
        # Code before the import may ask whether and where torch is installed (importlib.util.find_spec).
        spec.has_location, spec.cached = real.has_location, real.cached
        return spec

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of torch's own loader, for example to read torch's source files."""
        if name.startswith("_"):  # of this class itself: before __init__ has set _spec, the line below would recurse
            raise AttributeError(name)
        return getattr(self._spec.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Put all of torch's modules back into sys.modules."""
        self._is_used = True
        with contextlib.suppress(ValueError):  # the script has wrapped the finders
            sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec that importlib has replaced, and print which variables were set too late."""
        module.__spec__ = self._spec
        changed = {name for name, _ in self._environ.items() ^ dict(os.environ).items()}
        late = sorted(name for name in changed if not is_read_later(name))
        if late and os.environ.get(names.LOCAL_RANK) == "0":  # one message for all ranks of the node
            when = f"{', '.join(late)} changed before the import of torch, in code that ddprun does not read"
            reason = "this has no effect, because torch was imported once for all ranks; use --exec"
            print(f"ddprun: {when}: {reason}", file=sys.stderr)
