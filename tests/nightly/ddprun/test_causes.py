"""The cause of a rank's failure in one line, however its script ends, forked and executed."""

import re

import pytest
from tests.nightly.ddprun.failing_scripts import TEN
from tests.nightly.ddprun.supervised import run_ranks

from ddprun.output.rank_errors import last_error
from ddpwire import names
from ddpwire.run_files import rank_error, rank_log

LAST = "the last traceback in its log: "
# name: the script, its exit code, the cause of a forked rank, and of an executed one where that is another
CAUSES = {
    "exception": ("raise ValueError('bad label 17')", 1, "ValueError: bad label 17"),
    "several lines": ("raise ValueError('line one\\nline two')", 1, "ValueError: line one",
                      f"{LAST}ValueError: line one"),
    "long": ("raise ValueError('x' * 300)", 1, f"ValueError: {'x' * 187}…"),
    "no words": ("raise StopAsyncIteration", 1, "StopAsyncIteration"),
    "own class": ("class Bad(Exception): pass\nraise Bad('x')", 1, "Bad: x", "Bad: x"),
    "of a module": ("import json; json.loads('{')", 1, "json.decoder.JSONDecodeError: Expecting property name"),
    "syntax": ("x = (", 1, "SyntaxError: '(' was never closed (script.py, line 1)",
               "SyntaxError: '(' was never closed"),
    "indentation": ("if 1:\nx = 1", 1, "IndentationError: expected an indented block after 'if' statement",
                    "IndentationError: expected an indented block after 'if' statement"),
    "import": ("import nothing_of_this_name", 1, "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    "group": ("raise ExceptionGroup('two', [ValueError(1), KeyError(2)])", 1,
              "ExceptionGroup: two (2 sub-exceptions): ValueError: 1", "ExceptionGroup: two (2 sub-exceptions)"),
    "notes": ("e = KeyError('x')\ne.add_note('in epoch 3')\nraise e", 1, "KeyError: 'x'", f"{LAST}KeyError: 'x'"),
    "chain": ("try:\n  1 / 0\nexcept ZeroDivisionError as e:\n  raise RuntimeError('no loss') from e", 1,
              "RuntimeError: no loss"),
    "during": ("try:\n  1 / 0\nexcept ZeroDivisionError:\n  raise RuntimeError('no loss')", 1,
               "RuntimeError: no loss"),
    "state dict": (
        "import torch\ntorch.nn.Linear(2, 2).load_state_dict({})", 1,
        "RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: \"weight\", \"bias\"."),
    "shapes": ("import torch\ntorch.ones(2, 3) + torch.ones(2, 4)", 1,
               "RuntimeError: The size of tensor a (3) must match the size of tensor b (4)"),
    "worker": (
        "import torch\nclass Set(torch.utils.data.Dataset):\n  def __len__(self): return 4\n"
        "  def __getitem__(self, i): raise OSError('no picture 3')\n"
        "for x in torch.utils.data.DataLoader(Set(), num_workers=1): pass", 1,
        "OSError: Caught OSError in DataLoader worker process 0: OSError: no picture 3",
        f"{LAST}OSError: Caught OSError in DataLoader worker process 0: OSError: no picture 3"),
    "spawned": (
        "import torch.multiprocessing as mp\ndef f(i): raise ValueError('bad label 17')\n"
        "if __name__ == '__main__': mp.spawn(f)", 1,
        "ValueError: bad label 17"),
    "device-side": (
        "raise RuntimeError('CUDA error: device-side assert triggered\\nCUDA kernel errors might be asynchronously "
        "reported at some other API call, so the stacktrace below might be incorrect.\\nFor debugging consider "
        "passing CUDA_LAUNCH_BLOCKING=1\\n')", 1,
        "RuntimeError: CUDA error: device-side assert triggered",
        f"{LAST}RuntimeError: CUDA error: device-side assert triggered"),
    "nccl": (
        "import torch.distributed as d\nraise d.DistBackendError('NCCL error in: NCCLUtils.hpp:77, unhandled system "
        "error (run with NCCL_DEBUG=INFO for details), NCCL version 2.29\\nncclSystemError: System call failed.\\n"
        "Last error:\\nConnect to 10.0.0.1 failed')", 1,
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled system error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.29: Connect to 10.0.0.1 failed",
        f"{LAST}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:77, unhandled system error (run "),
    "assert": ("assert 1 == 2, 'labels differ'", 1, "AssertionError: labels differ"),
    "its own hook": (
        "import sys\nsys.excepthook = lambda kind, error, frames: print('Oh no', file=sys.stderr)\n1 / 0", 1,
        "ZeroDivisionError: division by zero", ""),
    "hydra": (
        "import sys, traceback\ntry:\n  raise KeyError('lr')\nexcept KeyError:\n"
        "  print('Error executing job with overrides: []', file=sys.stderr)\n  traceback.print_exc()\n"
        "  print('\\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.', file=sys.stderr)\n"
        "  sys.exit(1)", 1, "KeyError: 'lr'", f"{LAST}KeyError: 'lr'"),
    "record": (
        "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main():\n"
        "  raise ValueError('bad label 17')\nmain()", 1, "ValueError: bad label 17"),
    "a word of bytes": ("raise ValueError(b'\\xff\\xfe')", 1, "ValueError: b'\\xff\\xfe'"),
    "its own words fail": (
        "class Bad(Exception):\n  def __str__(self): raise KeyError\nraise Bad", 1, "Bad",
        "Bad: <exception str() failed>"),
    "recursion": ("def f(): f()\nf()", 1, "RecursionError: maximum recursion depth exceeded"),
    "text": ("import sys; sys.exit('no such data')", 1, "no such data", ""),
    "list": ("import sys; sys.exit(['no', 'data'])", 1, "['no', 'data']", ""),
    "last words": (
        "import atexit; atexit.register(print, 'wandb: Synced 5 files')\nraise OSError('disk')", 1, "OSError: disk",
        f"{LAST}OSError: disk"),
    "caught": (
        "import sys, traceback\ntry:\n  1 / 0\nexcept ZeroDivisionError:\n  traceback.print_exc()\nsys.exit(3)", 3, ""),
    "caught long ago": (
        "import sys, traceback\ntry:\n  1 / 0\nexcept ZeroDivisionError:\n  traceback.print_exc()\n"
        "for step in range(30): print('step', step)\nsys.exit(1)", 1, ""),
    "number": ("import sys; sys.exit(7)", 7, ""),
    "usage": ("import argparse\nargparse.ArgumentParser().parse_args(['--lr'])", 2,
        "script.py: error: unrecognized arguments: --lr"),
    "own error file": (
        "import json, os, sys\nwith open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:\n"
        "  json.dump({'message': {'message': 'no such shard', 'extraInfo': {}}}, file)\nsys.exit(7)", 7,
        "no such shard"),
}  # fmt: skip


def described(tmp_path, how, scripts):
    """Return the exit code and the cause of each script, as ranks of one supervisor."""
    lines = []
    for rank, script in enumerate(scripts):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}/script.py").write_text(script)
        error = {names.ERROR_FILE: str(tmp_path / rank_error(rank))}
        lines.append([[str(tmp_path / f"{rank}/script.py")], error])
    ended, executed = run_ranks(how, lines, tmp_path, timeout_s=290)
    assert executed == []
    results = []
    for rank, (output, code) in enumerate(ended):
        (tmp_path / rank_log(rank)).write_text(output)
        results.append((code, last_error(tmp_path, rank, code) if code > 0 else ""))
    return results


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_the_cause_is_named_and_none_is_invented(tmp_path, how):
    results = described(tmp_path, how, [script for script, *_ in CAUSES.values()])
    wrong = {
        name: (code, cause)
        for (name, (_, expected_code, *causes)), (code, cause) in zip(CAUSES.items(), results, strict=True)
        for expected in [causes[0 if how == "fork" else -1]]
        if code != expected_code or not (cause.startswith(expected) if expected else cause == "")
    }
    assert wrong == {}


def without_addresses(text):
    return re.sub(r"\b0x[0-9a-f]+", "…", text)


@pytest.mark.parametrize("how", ["fork", "exec"])
def test_the_causes_of_ten_scripts_of_another_author_are_named(tmp_path, how):
    """Each text is a part of the line: classes are written without their modules, and supervise.py takes out "0x…"."""
    results = described(tmp_path, how, [script for script, *_ in TEN.values()])
    wrong = {
        name: (code, cause)
        for (name, (_, expected_code, expected)), (code, cause) in zip(TEN.items(), results, strict=True)
        if code != expected_code
        or not (without_addresses(expected) in without_addresses(cause) if expected else cause == "")
    }
    assert wrong == {}


@pytest.mark.parametrize("options", [(), ("--exec",)], ids=["forked", "executed"])
@pytest.mark.parametrize("name", ["exception", "last words", "caught"])
def test_the_outcome_has_the_cause(runs, name, options, tmp_path):
    text, code, *causes = CAUSES[name]
    script = tmp_path / "script.py"
    script.write_text(text)
    node = runs.start(str(script), options=options)
    assert node.end() == code
    cause = causes[-1 if options else 0]
    if options:  # the fixture has stdout and stderr apart: their lines in the log are not in order
        cause = ""
    assert node.outcome().message == f"rank 0 on node 0 exited with {code}" + (cause and f": {cause}")


def test_a_debugger_that_has_no_stdin_is_told_how_to_get_one(runs, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    breakpoint()\ntime.sleep(60)"
    )
    node = runs.start(str(tmp_path / "script.py"), options=("--nproc-per-node", "2"))
    assert (node.end(), node.outcome().rank) == (1, 1)
    assert "bdb.BdbQuit" in node.outcome().message
    assert "--debug-rank 1" in node.outcome().message
