"""A rank that was forked is, to its script and to whoever waits for it, what an executed one is."""

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

KEEP = Path(__file__).parent / "scripts" / "keep.py"

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
        import os, signal, threading, time
        def work():
            time.sleep(0.2)
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


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every command line by its name, in a folder of their own."""
    folder = tmp_path_factory.mktemp("scripts")
    lines: dict[str, Any] = {}
    for number, (name, text) in enumerate(SCRIPTS.items()):
        path = folder / f"script_{number}.py"
        path.write_bytes(text if isinstance(text, bytes) else _unindented(text).encode())
        lines[name] = [str(path), "--epochs", "3", ""]
    tell = "import sys; print(sys.argv, sys.path[:2], __name__, __file__, __package__, __spec__); {}['x']\n"
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("print('imported', __name__)\n")
    (folder / "package" / "__main__.py").write_text(tell)
    (folder / "package" / "part.py").write_text(tell)
    with zipfile.ZipFile(folder / "zipped.zip", "w") as archive:
        archive.writestr("__main__.py", tell)
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
    return {"folder": folder, "lines": lines}


@pytest.fixture(scope="module")
def ends(lines: dict[str, Any]) -> dict[str, dict[str, list[Any]]]:
    """What every command line said and ended with, forked and executed."""
    found = {}
    for how in ("fork", "exec"):
        done, plain = keep(how, [[line, {"TELL": "x"}] for line in lines["lines"].values()], lines["folder"])
        assert plain == []
        found[how] = dict(zip(lines["lines"], done, strict=True))
    return found


@pytest.mark.parametrize(
    "name",
    [
        *SCRIPTS,
        *("a relative path", "a link", "a folder", "a zip file", "a package", "a module", "no module", "no script"),
        "a folder without a program",
    ],
)
def test_a_fork_is_what_an_execution_is(ends, name):
    assert ends["fork"][name] == ends["exec"][name]


def test_what_a_process_draws_or_reads_for_itself(tmp_path):
    path = tmp_path / "draw.py"
    path.write_text(DRAW)
    env = {"OMP_NUM_THREADS": "3"}
    done, plain = keep("fork", [[[str(path)], env], [[str(path)], env]], tmp_path)
    assert plain == []
    (first, _), (second, _) = (([json.loads(line) for line in text.splitlines()], status) for text, status in done)
    assert (
        first[0] == second[0] == {"already there": True, "cuda": False, "threads": 3, "python's threads": 1, "gpus": []}
    )
    assert len({str(drawn) for drawn in first[1].items()} & {str(drawn) for drawn in second[1].items()}) == 0


DRAW = """
import sys
there = "torch._dynamo" in sys.modules
import json, multiprocessing, os, random, threading
import numpy, torch
opened = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
print(json.dumps({"already there": there, "cuda": torch.cuda.is_initialized(), "threads": torch.get_num_threads(),
    "python's threads": threading.active_count(), "gpus": [path for path in opened if "nvidia" in path]}))
drawn = {"random": random.random(), "numpy": numpy.random.rand(), "torch": torch.rand(1).item(),
    "key": multiprocessing.current_process().authkey.hex()}
letters = str.maketrans("0123456789", "qrstuvwxyz")  # lest a number looks like a pid, which is masked
print(json.dumps({name: str(value).translate(letters) for name, value in drawn.items()}))
"""


def test_a_loader_s_workers_of_every_kind_and_ranks_of_ranks(tmp_path):
    path = tmp_path / "children.py"
    path.write_text(CHILDREN)
    done, plain = keep("fork", [[[str(path)], {}]], tmp_path)
    assert plain == []
    assert done == [["fork 28\nspawn 28\nforkserver 28\nall-reduced 3.0\nall-reduced 3.0\n", 0]]


CHILDREN = """
import os, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.tensor(index)
def rank_of_a_rank(rank, path):
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    os.write(1, f"all-reduced {total.item()}\\n".encode())
    dist.destroy_process_group()
if __name__ == "__main__":
    for context in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=context)
        print(context, sum(int(batch.sum()) for batch in loader))
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of_a_rank, (folder + "/meet",), nprocs=2)
"""


def test_where_a_fork_would_be_another_program_it_is_executed_and_said(tmp_path):
    (tmp_path / "script.py").write_text("import queue, sys; print(queue.__file__, 'torch' in sys.modules)")
    (tmp_path / "queue.py").touch()
    done, plain = keep("fork", [[["script.py"], {}], [["script.py"], {}]], tmp_path)
    assert done == [[f"{tmp_path}/queue.py False\n", 0]] * 2
    assert plain == [f"{tmp_path}/queue.py would hide a module that is already imported"]


@pytest.mark.parametrize("options", [(), ("-P",)])
def test_the_first_path_is_the_script_s_whatever_ddprun_s_is(tmp_path, options):
    (tmp_path / "script.py").write_text("import sys; print(sys.path[0], 'torch' in sys.modules)")
    lines = [[["script.py"], {}], [["-m", "script"], {}], [["script.py"], {"PYTHONSAFEPATH": "1"}]]
    done, plain = keep("fork", lines, tmp_path, options=options)
    trainer = Path(__file__).parents[2] / "trainer"
    assert (done, plain) == ([[f"{folder} True\n", 0] for folder in (tmp_path, tmp_path, trainer)], [])


def test_options_of_the_interpreter_are_not_the_ranks_own(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print(sys.flags.dont_write_bytecode, 'torch' in sys.modules)")
    done, plain = keep("fork", [[["script.py"], {}]], tmp_path, options=("-B",))
    assert done == [["0 False\n", 0]]
    assert plain == ["ddprun's Python was started with options of its own (-B)"]


def test_ddprun_forks_unless_it_is_told_to_execute(runs, tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    for options in ((), ("--exec",)):
        node = runs.start(str(tmp_path / "script.py"), options=options)
        assert node.end() == 0
    assert node.log(0) == "True\nFalse\n"


def keep(how: str, lines: list[Any], folder: Path, options: tuple[str, ...] = ()) -> Any:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2] / "trainer")
    done = subprocess.run(
        [sys.executable, *options, str(KEEP), how],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environ,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def _unindented(text: str) -> str:
    return textwrap.dedent(text.lstrip("\n"))
