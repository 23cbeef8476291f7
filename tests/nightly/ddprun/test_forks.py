"""What a forked rank has for itself, what it may start, and when a rank is executed instead."""

import json
from pathlib import Path

import pytest
from tests.nightly.ddprun.supervised import run_ranks


def test_a_forked_rank_draws_its_own_random_numbers(tmp_path):
    path = tmp_path / "draw.py"
    path.write_text(DRAW)
    env = {"OMP_NUM_THREADS": "3"}
    done, plain = run_ranks("fork", [[[str(path)], env], [[str(path)], env]], tmp_path)
    assert plain == []
    (first, _), (second, _) = (([json.loads(line) for line in text.splitlines()], status) for text, status in done)
    assert (
        first[0] == second[0] == {"already there": True, "cuda": False, "threads": 3, "python's threads": 1, "gpus": []}
    )
    assert len({str(drawn) for drawn in first[1].items()} & {str(drawn) for drawn in second[1].items()}) == 0


DRAW = """
import gc
there = gc.get_freeze_count() > 5000
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


def test_a_script_chooses_its_temporary_folder(runs, tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "own"
    folder.mkdir()
    script.write_text(
        f"import os, tempfile\nos.environ['TMPDIR'] = {str(folder)!r}\nprint('at', tempfile.gettempdir())"
    )
    node = runs.start(str(script), env={"DDP_RUN_DIR": ""})  # ddprun makes a temporary folder itself
    assert node.end() == 0
    assert f"at {folder}\n" in node.stdout.read_text()


def test_where_a_fork_would_be_another_program_it_is_executed_and_reported(tmp_path):
    (tmp_path / "script.py").write_text("import gc, queue; print(queue.__file__, gc.get_freeze_count() > 5000)")
    (tmp_path / "queue.py").touch()
    done, plain = run_ranks("fork", [[["script.py"], {}], [["script.py"], {}]], tmp_path)
    assert done == [[f"{tmp_path}/queue.py False\n", 0]] * 2
    (reason,) = plain
    assert f"{tmp_path}/queue.py" in reason


@pytest.mark.parametrize("options", [(), ("-P",)])
def test_the_first_path_is_the_script_s_whatever_ddprun_s_is(tmp_path, options):
    (tmp_path / "script.py").write_text("import gc, sys; print(sys.path[0], gc.get_freeze_count() > 5000)")
    lines = [[["script.py"], {}], [["-m", "script"], {}], [["script.py"], {"PYTHONSAFEPATH": "1"}]]
    done, plain = run_ranks("fork", lines, tmp_path, options=options)
    trainer = Path(__file__).parents[3] / "trainer"
    assert (done, plain) == ([[f"{folder} True\n", 0] for folder in (tmp_path, tmp_path, trainer)], [])


def test_options_of_the_interpreter_are_not_the_ranks_own(tmp_path):
    (tmp_path / "script.py").write_text(
        "import gc, sys; print(sys.flags.dont_write_bytecode, gc.get_freeze_count() > 5000)"
    )
    done, plain = run_ranks("fork", [[["script.py"], {}]], tmp_path, options=("-B",))
    assert done == [["0 False\n", 0]]
    (reason,) = plain
    assert "-B" in reason
