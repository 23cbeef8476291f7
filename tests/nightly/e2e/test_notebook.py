"""More of ``ddpctl.notebook.launch`` in a real kernel: names, resume, scripts, what is refused, ranks without fork."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import outcome_of, processes_of
from tests.e2e.kernel import Kernel

# The client's own warnings change from version to version. A busy machine gets time.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(900)]

TRAIN = """
from ddpctl.notebook import launch, RankError

scale = 3

def doubled(x):
    return 2 * x

def train(x, base=0):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(2) * doubled(x)
    dist.all_reduce(total)
    return {"sum": total, "rank": dist.get_rank(), "base": base * scale}
"""
BAD = """
import os

def bad(label):
    if os.environ["RANK"] == "1":
        raise ValueError(f"bad label {label}")
    import time
    time.sleep(60)
"""
SLOW = """
def slow():
    import os, time
    import ddpwire.script as ddp
    for step in range(1, 1000):
        time.sleep(0.1)
        ddp.progress(step, samples=8, loss=10 / step)
        stops = ddp.should_stop()
        if step == 1:
            print("begun", os.environ["RANK"], flush=True)  # from the first should_stop on, a stop waits for a save
        if stops:
            (ddp.checkpoint_dir() / f"{os.environ['RANK']}.txt").write_text(str(step))
            ddp.stop()
"""

COUNT = """
from ddpctl.notebook import launch

def list_and_save(mine):
    import ddpwire.script as ddp
    names = sorted(path.name for path in ddp.checkpoint_dir().iterdir())
    (ddp.checkpoint_dir() / mine).touch()
    return names

def first(mine):
    return list_and_save(mine)

def second(mine):
    return list_and_save(mine)
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    with Kernel(tmp_path) as kernel:
        yield kernel


def test_a_function_may_be_launched_again_and_names_its_runs(kernel: Kernel) -> None:
    assert kernel.run(TRAIN).error == ""
    look_at_its_name_wherever_runs_are_listed(kernel)
    answer = kernel.run("launch(train, gpus=2, args=(0.5,), kwargs={'base': 7}, name='first')")
    assert answer.error == "", answer.traceback
    assert {"2", "train()", "local"} <= {*line_of(answer.text, "run 'first': ").split()}
    answer = kernel.run("print(launch(train, gpus=2, args=(1,), name='second')['sum'].tolist())")
    assert (answer.error, answer.text.splitlines()[-1]) == ("", "[4.0, 4.0]")
    assert not processes_of("first")
    assert not processes_of("second")
    remaining = kernel.run(
        "import pathlib, os; print([p.name for p in pathlib.Path(os.environ['DDPCTL_STATE_DIR']).glob('.calls/*')])\n"
        "try:\n    print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError as error:\n    print(error)"
    )
    assert remaining.text == "[]\n[Errno 10] No child processes\n"


def line_of(text: str, start: str) -> str:
    """The one line that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def plain(text: str) -> str:
    """Without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def ddpctl_here(*arguments: str) -> str:
    """What ddpctl says of the kernel's runs."""
    done = subprocess.run([sys.executable, "-m", "ddpctl", *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def look_at_its_name_wherever_runs_are_listed(kernel: Kernel) -> None:
    """Run a function without a name for its run: the kernel's first run, which ps lists alone."""
    answer = kernel.run("def fine_tune():\n    return 5\nlaunch(fine_tune, gpus=1)")
    (name,) = re.findall(r"^run '(fine-tune-[a-z]+)': ", answer.text)
    assert ddpctl_here("ps").splitlines()[1].split()[-1] == "fine_tune"
    assert "fine_tune()" in line_of(answer.text, f"run '{name}': ").split()
    assert "fine_tune" in ddpctl_here("status", name).splitlines()[1]


def test_an_exception_of_a_rank_can_be_caught_with_its_fields(kernel: Kernel, tmp_path: Path) -> None:
    assert kernel.run(TRAIN).error == ""  # cell 1
    assert kernel.run(BAD).error == ""  # cell 2
    traceback = (
        "Traceback (most recent call last):",
        '  File "Cell In[2]", line 5, in bad',
        '    raise ValueError(f"bad label {label}")',
        "ValueError: bad label 18",
    )
    caught = kernel.run(
        "try:\n    launch(bad, gpus=2, args=(18,))\nexcept RankError as error:\n"
        "    print(error.rank, error.cell, error.line, error.code, repr(error.__cause__))\n"
        "    print(error.traceback)\n"
        "    import traceback; print(len(traceback.extract_tb(error.__traceback__)))"
    )
    # Of the frames here, the cell's and that of launch are left.
    assert caught.text.splitlines()[-6:] == [
        "1 Cell In[2] 5 1 ValueError('bad label 18')", *traceback, "2"
    ]  # fmt: skip
    assert not processes_of("bad")


def test_the_traceback_of_a_usage_error_has_only_the_cells_frames(kernel: Kernel) -> None:
    answer = kernel.run("from ddpctl.notebook import launch\ndef go():\n    launch(7)\ngo()")
    assert answer.error == "UsageError"
    assert plain(answer.traceback) == (
        "Traceback (most recent call last):\n"
        '  File "Cell In[1]", line 4, in <module>\n'
        "    go()\n"
        '  File "Cell In[1]", line 3, in go\n'
        "    launch(7)\n"
        f"UsageError: {answer.value}"
    )
    assert "int" in answer.value.split()


def test_the_curve_in_the_cell_ends_at_the_last_step(kernel: Kernel) -> None:
    kernel.run(TRAIN + SLOW.replace("1000", "60"))  # 59 steps
    answer = kernel.run("launch(slow, gpus=2, name='curve')")
    assert answer.error == "", answer.traceback
    picture = answer.pictures[-1]
    assert re.search(r"</svg>\s*<pre>step 59   loss 0\.1695   [\d,]+ samples/s</pre>$", picture), answer.pictures
    assert re.findall(r"<text [^>]*>(loss|step)</text>", picture) == ["loss", "step"]
    assert re.search(r'<polyline points="[^"]*\b544\.0,\S+" ', picture)  # the right end of the axis


def test_resume_continues_the_newest_run_of_the_same_function(kernel: Kernel) -> None:
    kernel.run(COUNT)
    assert kernel.run("launch(first, gpus=1, args=('a',), name='one')").text.endswith("\n[]\n")
    assert kernel.run("launch(second, gpus=1, args=('b',), name='two')").text.endswith("\n[]\n")
    kernel.run(COUNT)  # the cell is run again
    answer = kernel.run("launch(first, gpus=1, args=('c',), resume=True)")
    assert answer.text.endswith("\n['a']\n"), answer.text
    assert "'one'" in answer.text.splitlines()[0]
    assert kernel.run("launch(first, gpus=1, args=('d',), resume=True)").text.endswith("\n['a', 'c']\n")
    refused = kernel.run("launch(lambda: 1, gpus=1, resume=True)")
    assert (refused.error, "lambda" in refused.value) == ("UsageError", True)


def test_a_value_that_cannot_be_pickled_is_named(kernel: Kernel) -> None:
    kernel.run(TRAIN)
    kernel.run(
        "import threading\nlock = threading.Lock()\ndef inner():\n    return lock\ndef outer():\n    return inner()"
    )
    answer = kernel.run("launch(outer)")
    assert answer.error == "ConfigError"
    assert [name for name in ("outer()", "'lock'") if name not in answer.value] == []
    answer = kernel.run("launch(train, args=((n for n in range(3)),))")
    assert answer.error == "ConfigError"
    assert [name for name in ("train()", "'args[0]'", "generator") if name not in answer.value] == []
    answer = kernel.run("launch(lambda: (n for n in range(3)), gpus=1)")
    assert answer.error == "RankError"
    assert [fact for fact in ("rank 0", "Cell In[5]", "line 1", "generator") if fact not in answer.value] == []
    answer = kernel.run("launch(train, gpus=0)")
    assert (answer.error, "gpus" in answer.value) == ("UsageError", True)
    assert kernel.run("import sys; 'torch' in sys.modules").text == "False\n"  # nor has anything of CUDA been touched


def test_a_script_is_launched_from_a_cell(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('rank', os.environ['RANK'], sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n"
    )
    kernel.run("from ddpctl.notebook import launch")
    answer = kernel.run(
        "run = launch('train.py', gpus=2, args=[0], name='script')\n(run.run, run.code, run.checkpoint_dir.name)"
    )
    assert answer.text.endswith("('script', 0, 'checkpoints')\n")
    assert "[node0 rank1] rank 1 ['0']\n" in answer.text
    answer = kernel.run("launch('train.py', gpus=2, args=[3], name='three')")
    assert (answer.error, answer.traceback.splitlines()[-1]) == (
        "RankError", f"RankError: {answer.value.splitlines()[0]}"
    )  # fmt: skip
    outcome = outcome_of(tmp_path, "three")
    assert (outcome.code, outcome.cause, outcome.node) == (3, "error", 0)
    assert answer.value == f"{outcome.message}\nrank {outcome.rank} ['3']"
    answer = kernel.run("launch('no.py')")
    assert (answer.error, "no.py" in answer.value) == ("NoInputError", True)


def test_a_packed_function_runs_in_ranks_that_are_not_forked(tmp_path: Path) -> None:
    """As on platforms that only spawn: --exec starts each rank as a new interpreter. The other tests fork the ranks."""
    import pickle

    from ddpctl.notebook.serialization import pack

    file = tmp_path / "call.pkl"
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(  # noqa: S102
        "def called(x):\n    import os\n    return x + int(os.environ['WORLD_SIZE'])", namespace
    )
    file.write_bytes(pack(namespace["called"], (40,), {}))  # type: ignore[arg-type]
    arguments = ["--nproc-per-node", "2", "--exec", "-m", "ddpctl.notebook.rank_main", str(file)]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddprun", *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert pickle.loads((tmp_path / "result.pkl").read_bytes()) == 42  # noqa: S301
