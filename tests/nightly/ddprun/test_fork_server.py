"""A rank that was forked is, to its script and to whoever waits for it, what an executed one is."""

import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.nightly.ddprun.supervised import run_ranks

SCRIPTS = {
    "what it is": """
        import sys
        print(sys.argv, sys.orig_argv[1:], sys.path, sorted(globals()), __name__, __file__, __spec__, __package__)
        print(__loader__.__class__, __builtins__, __annotations__, sys.modules["__main__"].__dict__ is globals())
        print(sys.flags.safe_path, sys.warnoptions, sys.executable, sys.getrecursionlimit(), sys.gettrace())
    """,
    "its streams": """
        import sys
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            print(stream, stream.name, stream.mode, stream.encoding, stream.errors, stream.fileno(), stream.isatty())
            print(stream.line_buffering, stream.write_through, stream.newlines, stream.seekable(), type(stream.buffer))
            print(stream is getattr(sys, f"__{stream.name[1:-1]}__"))
        print(repr(sys.stdin.read()))
        print("to stderr", file=sys.stderr)
        print("a torn ", end="")
        print("line", end="")
    """,
    "its place": """
        import os, signal, sys, threading
        print([(n, str(signal.getsignal(n))) for n in sorted(signal.valid_signals())], signal.pthread_sigmask(0, []))
        print(sorted(os.environ.items()))
        print(os.getcwd(), os.umask(0), os.getsid(0) == os.getpid() == os.getpgid(0))
        print(sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.enumerate())
        print(os.readlink("/proc/self/fd/0"), open("/proc/self/stat").read().split()[3] == str(os.getppid()))
    """,
    "a thread that raises": """
        import threading
        def report():
            raise OSError("the connection is lost")
        thread = threading.Thread(target=report, name="report")
        thread.start()
        thread.join()
        print("continues")
    """,
    "no end of its own": "x = 1",
    "exit None": "import sys; sys.exit()",
    "exit 3": "import sys; sys.exit(3)",
    "exit 300": "import sys; sys.exit(300)",
    "exit -1": "raise SystemExit(-1)",
    "exit True": "raise SystemExit(True)",
    "exit with words": "import sys; sys.exit('no such data')",
    "exit with a tuple": "raise SystemExit(3, 4)",
    "os._exit": """
        import atexit, os
        atexit.register(print, "never")
        os._exit(7)
    """,
    "an exception": """
        def reader():
            raise KeyError("lr")
        try:
            reader()
        except KeyError as error:
            raise ValueError("a bad configuration") from error
    """,
    "an exception within": """
        try:
            1 / 0
        except ZeroDivisionError:
            {}["x"]
    """,
    "no syntax": "print('never')\nif True print(1)\n",
    "a latin script": "# -*- coding: latin-1 -*-\nprint(ascii('é'))\n".encode("latin-1"),
    "a hook": """
        import sys
        sys.excepthook = lambda kind, error, traceback: print("caught", kind, error, traceback.tb_lineno)
        raise ValueError(1)
    """,
    "a broken hook": """
        import sys
        def hook(*_):
            raise KeyError(2)
        sys.excepthook = hook
        raise ValueError(1)
    """,
    "Ctrl-C": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "SIGTERM": "import os, signal, time; print('here'); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)",
    "SIGTERM, handled": """
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        os.kill(os.getpid(), signal.SIGTERM)
    """,
    "a segmentation fault": "import ctypes; ctypes.string_at(0)",
    "the order of the end": """
        import atexit, sys, threading, time
        atexit.register(print, "first registered, last called")
        atexit.register(lambda: print(threading.enumerate()))
        def work(name, seconds):
            time.sleep(seconds)
            print(name)
        threading.Thread(target=work, args=("joined", 0.1)).start()
        threading.Thread(target=work, args=("left behind", 9), daemon=True).start()
        print("the end")
        sys.exit(4)
    """,
    "Ctrl-C while threads are joined": """
        import linecache, os, signal, sys, threading, time
        def line_of_main():
            frame = sys._current_frames()[threading.main_thread().ident]
            return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        def work():
            while line_of_main() not in ("lock.acquire()", "_thread_shutdown()"):  # by version of Python
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            print("never")
        threading.Thread(target=work).start()
    """,
    "a broken end": """
        import atexit
        def broken():
            raise RuntimeError("in atexit")
        atexit.register(print, "still called")
        atexit.register(broken)
    """,
    "threads that fail": """
        import sys, threading
        for deed in (lambda: sys.exit(5), lambda: [][0]):
            thread = threading.Thread(target=deed, name="a thread")
            thread.start()
            thread.join()
    """,
    "files that are left open": """
        import os, ctypes
        file = os.fdopen(os.dup(1), "w")
        file.write("written, not closed\\n")
        ctypes.CDLL(None).printf(b"said by C\\n")
    """,
    "a temporary folder": """
        import tempfile, pathlib, atexit, warnings
        folder = tempfile.TemporaryDirectory()
        warnings.simplefilter("ignore")
        atexit.register(lambda: print(pathlib.Path(folder.name).exists()))
    """,
    "warnings": """
        import warnings
        def deep():
            warnings.warn("mind the gap", stacklevel=2)
        deep()
        warnings.warn("old", DeprecationWarning)
    """,
    "pickle and every kind of child": """
        import multiprocessing, os, pickle, subprocess, sys
        class Thing:
            pass
        def square(number):
            return number * number, __name__, type(Thing()).__module__
        if __name__ == "__main__":
            print(type(pickle.loads(pickle.dumps(Thing()))) is Thing)
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(method, pool.map(square, [1, 2, 3]))
            print(subprocess.run([sys.executable, "-c", "import sys; print(sys.argv)"], capture_output=True).stdout)
            pid = os.fork()
            if not pid:
                os._exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            print(multiprocessing.active_children())
    """,
    "another program": "import os; os.execv('/bin/sh', ['sh', '-c', 'echo executed; exit 6'])",
    "asyncio": """
        import asyncio
        async def main():
            process = await asyncio.create_subprocess_exec("/bin/echo", "a child")
            print(await process.wait())
            await asyncio.gather(asyncio.to_thread(print, "in a thread"))
        asyncio.run(main())
    """,
}


def write_scripts(folder: Path) -> dict[str, Any]:
    """Write the scripts into the folder; return every command line by its name."""
    lines: dict[str, Any] = {}
    for number, (name, text) in enumerate(SCRIPTS.items()):
        path = folder / f"script_{number}.py"
        path.write_bytes(text if isinstance(text, bytes) else _unindented(text).encode())
        lines[name] = [str(path), "--epochs", "3", ""]
    emit = "import sys; print(sys.argv, sys.path[:2], __name__, __file__, __package__, __spec__); {}['x']\n"
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("print('imported', __name__)\n")
    (folder / "package" / "__main__.py").write_text(emit)
    (folder / "package" / "part.py").write_text(emit)
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", emit)
    (folder / "link.py").symlink_to(folder / "package" / "part.py")
    lines |= {
        "a relative path": ["./package/part.py", "x"],
        "a link": ["link.py"],
        "a folder": ["package"],
        "a zip file": ["zipped.zip", "x"],
        "a package": ["-m", "package", "x"],
        "a module": ["-m", "package.part", "x"],
        "no module": ["-m", "package.nothing"],
        "no script": ["nothing.py"],
        "a folder without a program": [str(folder)],
    }
    return lines


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """What every command line said and ended with, forked and executed, in the environment of the tests' start."""
    folder = tmp_path_factory.mktemp("scripts")
    lines, outcomes = write_scripts(folder), {}
    for how in ("fork", "exec"):
        done, plain = run_ranks(how, [[line, {"TELL": "x"}] for line in lines.values()], folder)
        assert plain == []
        outcomes[how] = dict(zip(lines, done, strict=True))
    return outcomes


@pytest.mark.timeout(600)  # two runs of all of them
def test_a_fork_is_what_an_execution_is(ends):
    fork, execution = ends["fork"], ends["exec"]
    assert {name: (fork[name], execution[name]) for name in fork if fork[name] != execution[name]} == {}


def _unindented(text: str) -> str:
    return textwrap.dedent(text.lstrip("\n"))
