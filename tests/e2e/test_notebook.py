"""``ddpctl.notebook.launch`` from the cells of a real kernel, with real ranks."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.driver import is_over, outcome_of, processes_of, wait_until
from tests.e2e.kernel import Kernel
from tests.in_process import ddpctl as in_process

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
from ddpctl.notebook import launch

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


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    with Kernel(tmp_path) as kernel:
        yield kernel


def plain(text: str) -> str:
    """Return the text without colors."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_cells_function_returns_its_result_and_its_exception_names_rank_cell_and_line(kernel: Kernel) -> None:
    assert kernel.run(TRAIN).error == ""  # cell 1
    answer = kernel.run("launch(train, gpus=2, args=(0.5,), kwargs={'base': 7}, name='first')")  # cell 2
    assert answer.error == "", answer.traceback
    assert answer.text.endswith("{'sum': tensor([2., 2.]), 'rank': 0, 'base': 21}\n")
    listed = in_process("ps").stdout.splitlines()[1].split()
    assert (listed[0], listed[-1]) == ("first", "train")
    assert kernel.run(BAD).error == ""  # cell 3
    answer = kernel.run("launch(bad, gpus=2, args=(17,), name='bad')")
    assert answer.error == "RankError"
    message, _, traceback = answer.value.partition("\n")
    assert traceback == (
        "Traceback (most recent call last):\n"
        '  File "Cell In[3]", line 5, in bad\n'
        '    raise ValueError(f"bad label {label}")\n'
        "ValueError: bad label 17"
    )
    assert plain(answer.traceback) == f"{traceback}\nRankError: {message}"
    assert [fact for fact in ("rank 1", "Cell In[3]", "line 5", "bad label 17") if fact not in message] == []
    assert not processes_of("first") | processes_of("bad")
    remaining = kernel.run(
        "import pathlib, os; print([p.name for p in pathlib.Path(os.environ['DDPCTL_STATE_DIR']).glob('.calls/*')])\n"
        "try:\n    print(os.waitpid(-1, os.WNOHANG))\nexcept ChildProcessError as error:\n    print(error.errno)"
    )
    assert remaining.text == "[]\n10\n"
    assert kernel.run("import sys; 'torch' in sys.modules").text == "True\n"  # to read the tensor of the result


def test_an_interrupted_cell_lets_its_ranks_save_and_the_ranks_of_a_killed_kernel_end(
    kernel: Kernel, tmp_path: Path
) -> None:
    kernel.run(SLOW)
    answer = kernel.run("launch(slow, gpus=2, name='slow', grace=20)", interrupt_at="begun 1")
    assert plain(answer.traceback) == (
        "Traceback (most recent call last):\n"
        '  File "Cell In[2]", line 1, in <module>\n'
        "    launch(slow, gpus=2, name='slow', grace=20)\n"
        "KeyboardInterrupt"
    )
    outcome = outcome_of(tmp_path, "slow")
    assert (outcome.code, outcome.cause) == (143, "stopped")
    assert json.loads(in_process("status", "slow", "--json").stdout)["state"] == "stopped"
    assert {path.name for path in (tmp_path / "runs/slow/checkpoints").iterdir()} == {"0.txt", "1.txt"}
    assert "loss</text>" in answer.pictures[-1]  # of the curve
    wait_until(lambda: is_over("slow"), "the ranks' end")

    thread = threading.Thread(target=lambda: kernel.run("launch(slow, gpus=2, name='left', grace=5)", timeout_s=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)  # its cell never ends
        thread.start()
        wait_until(lambda: len(processes_of("left")) >= 3, "ddprun and its ranks")
        kernel.kill()
        wait_until(lambda: is_over("left"), "their end")
        thread.join()
