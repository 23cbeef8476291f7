"""Programs as forks of a process that has imported torch: a start takes 0.4 s of CPU time, and not 3.5 s.

A program that imports no torch is a fork of a small process, which costs a tenth of a fork of the large one.
A fork is a process of its own, with the arguments, environment, folder and files that it is given. It has the command
line of the server in ``ps``, and the server's environment in ``/proc/PID/environ``.
"""

import atexit
import contextlib
import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import psutil

# Read by Python at its start, or by torch at its import. A program that has other values is executed.
READ_AT_START = ("PYTHON", "OMP_", "LD_", "TORCH")
FORKABLE = {"stdin", "stdout", "stderr", "cwd", "text"}  # options of Popen
# What the process has imported whose forks are these programs, or all others.
SMALL = ("ddprun.nodectl",)
LARGE = (
    *("torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo"),
    "torch.distributed.elastic.agent.server.local_elastic_agent",
)
PACKAGES = [str(Path(__file__).parents[1] / folder) for folder in ("cli", "trainer")]
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
# What `ip netns exec` does for $1, but for the network.
MOUNTS = """\
set -e
mount --make-rslave /
umount --lazy /sys
mount -t sysfs "$1" /sys
for path in /etc/netns/"$1"/*; do mount --bind "$path" "/etc/${path##*/}"; done
set +e
"""


def start(
    command: Sequence[str], *, env: Mapping[str, str], executed: bool = False, **options: Any
) -> subprocess.Popen[Any]:
    """Start ``python COMMAND`` with the options of Popen: as a fork, if that makes no difference.

    ``command`` is ``-m MODULE``, ``-c CODE`` or a file, and arguments.
    """
    forked = not executed and is_forkable(command, env, options)
    return (Fork if forked else subprocess.Popen)([sys.executable, *command], env=env, **options)


def start_on(machine: Any, *command: str, env: Mapping[str, str], **options: Any) -> subprocess.Popen[Any]:
    """Start ``python COMMAND`` on a machine of bench/lab.py: as a fork, if that makes no difference."""
    options = {name: value for name, value in options.items() if value is not None}
    own = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path != str(options.get("cwd"))]
    forked = {**env, "PYTHONPATH": os.pathsep.join(own)}
    starts_plainly = not (Path(options.get("cwd", "/")) / "sitecustomize.py").exists()
    if starts_plainly and is_forkable(command, forked, options):
        return Fork([sys.executable, *command], env=forked, machine=machine, **options)
    return subprocess.Popen(machine.command(sys.executable, *command), env=env, **options)


def is_forkable(command: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any]) -> bool:
    is_program = command[0] in ("-m", "-c") or command[0][0] != "-"
    return is_program and {*options} <= FORKABLE and read_at_start(env) == {"OMP_NUM_THREADS": "1"}


def run(
    command: Sequence[str], *, env: Mapping[str, str], given: Any = None, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run ``python COMMAND`` as ``subprocess.run`` does, with ``given`` as stdin, and return what it wrote."""
    pipes = {"stdin": subprocess.DEVNULL if given is None else subprocess.PIPE}
    pipes |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with start(command, env=env, **pipes) as process:
        try:
            out, err = process.communicate(given, timeout)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def descendants() -> list[psutil.Process]:
    """Every process that comes from a fork and lives, however far it has gone from its parents."""
    servers = [psutil.Process(server.pid) for server in _Server.instances.values()]
    return [process for server in servers for process in server.children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has neither ended nor, as one without a command line, given back its memory to end."""
    with contextlib.suppress(psutil.Error):
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.cmdline())
    return False


def read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process reads at its start, except a PYTHONPATH of only our own packages.

    A missing OMP_NUM_THREADS counts as 1: no fork tests that ddprun sets it for its import of torch.
    """
    variables = {"OMP_NUM_THREADS": "1"} | {name: env[name] for name in env if name.startswith(READ_AT_START)}
    variables.pop("OMP_WAIT_POLICY", None)
    if {*variables.get("PYTHONPATH", "").split(os.pathsep)} <= {*PACKAGES, ""}:
        variables.pop("PYTHONPATH", None)
    return variables


class Fork(subprocess.Popen[Any]):
    """A child of the server, which tells its exit code through a pipe."""

    def __init__(self, *args: Any, machine: Any = None, **options: Any) -> None:
        self._machine = machine and (machine.namespace, machine.name, f"{MOUNTS}{machine.setup} true")
        super().__init__(*args, **options)

    def _execute_child(self, args: Sequence[str], *options: Any) -> None:
        cwd, env = options[4:6]
        pipes = options[9:15]  # those of stdin, stdout and stderr, for reading and for writing
        streams = [number if own == -1 else own for number, own in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._status, writing = os.pipe()
        try:
            request = ([*args[1:]], dict(env), str(cwd or Path.cwd()), self._machine)
            imported = SMALL if args[1] == "-m" and args[2] in SMALL else LARGE
            self.pid = _Server.running(imported).fork(request, (*streams, writing))
        finally:
            os.close(writing)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            text = os.read(self._status, 16)
            os.close(self._status)
            self.returncode = int(text)
        return self.returncode


class _Server:
    """The process that forks, one for each process of pytest: a fork itself, of the root that the whole run shares."""

    instances: ClassVar[dict[Sequence[str], "_Server"]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()  # of its socket: a test may start programs in threads

    def __init__(self, imported: Sequence[str]) -> None:
        address = f"\0forks-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}-{imported[0]}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # another process of pytest has started the root
                    raise
            else:
                listener.listen()
                self.start_root(listener, imported)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(address)
        self.pid = int(self.socket.recv(16))
        atexit.register(self.socket.close)

    @staticmethod
    def start_root(listener: socket.socket, imported: Sequence[str]) -> None:
        environ = {name: os.environ[name] for name in os.environ if not name.startswith(READ_AT_START)}
        environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": os.pathsep.join(PACKAGES)}
        number = listener.fileno()
        root = subprocess.Popen(
            [sys.executable, __file__, str(number), *imported],
            pass_fds=[number],
            env=environ,
            stdin=subprocess.PIPE,  # closed when this process ends
            stdout=subprocess.DEVNULL,
        )
        atexit.register(root.communicate)

    @classmethod
    def running(cls, imported: Sequence[str]) -> "_Server":
        with cls.lock:
            if imported not in cls.instances:
                cls.instances[imported] = cls(imported)
        return cls.instances[imported]

    def fork(self, request: Sequence[Any], descriptors: Sequence[int]) -> int:
        with self.lock:
            socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)
            return int(self.socket.recv(16))


# ---- The servers


def fork_servers(listener: socket.socket) -> list[str]:
    """Fork a server for each process of pytest that connects, until the first of them ends. Return as ``serve``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    gc.enable()
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if not os.fork():
            listener.close()
            connection.send(str(os.getpid()).encode())
            return serve(connection)
        connection.close()
    os._exit(0)


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request, until pytest ends. Return only in the forks: the arguments of the program to run."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # see descendants()
    statuses: dict[int, int] = {}
    woken, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    while True:
        ready = select.select([requests, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 10)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if status := statuses.pop(ended[0], 0):
                        os.write(status, str(os.waitstatus_to_exitcode(ended[1])).encode())
                        os.close(status)
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not request:
                os._exit(0)
            pid = os.fork()
            if not pid:
                requests.detach()
                return set_up_fork(request, descriptors)
            for descriptor in descriptors[:3]:
                os.close(descriptor)
            statuses[pid] = descriptors[3]
            requests.send(str(pid).encode())


def set_up_fork(request: bytes, descriptors: Sequence[int]) -> list[str]:
    """Give this fork the arguments, environment, folder, machine and files of a request. Return the arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    argv, env, cwd, machine = json.loads(request)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if machine:
        move_to(*machine)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *argv]
    tempfile.tempdir = None  # TMPDIR is another
    return argv  # type: ignore[no-any-return]


def move_to(namespace: str, hostname: str, setup: str) -> None:
    """Move this process to a machine, and run the shell script ``setup`` there."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot move to {namespace}")
    socket.sethostname(hostname)
    subprocess.run(["/bin/sh", "-c", setup, "sh", namespace], env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=True)


def end(code: object) -> NoReturn:
    """End this process as Python does, but for the reports of libraries that it has not imported itself."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


def run_program(argv: list[str]) -> None:
    """Run ``-m MODULE``, ``-c CODE`` or a file as Python does."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    first, *others = argv
    sys.argv = [first, *others[1:]] if first in ("-m", "-c") else argv
    if first == "-m":
        sys.path[0] = str(Path.cwd())
        runpy._run_module_as_main(others[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.path[0] = ""
        exec(others[0], main.__dict__)  # noqa: S102
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)  # noqa: S102


if __name__ == "__main__":
    gc.disable()  # during the imports, garbage collections would take a fifth of the time
    for module in sys.argv[2:]:
        importlib.import_module(module)
        if module in SMALL:
            del sys.modules[module]  # it is to be run as __main__
    work = fork_servers(socket.socket(fileno=int(sys.argv[1])))
    try:
        run_program(work)
    except SystemExit as ending:
        end(ending.code)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        end(1)
    end(0)
