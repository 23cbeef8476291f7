"""What a script sets before it imports torch, and the variables of a job that ddprun is given in one."""

import os

import pytest

from ddprun.settings.script_environment import UNKNOWN, may_train, set_before_torch
from ddpwire import job_env, names

SOURCES = {
    "item": ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", ["OMP_NUM_THREADS"]),
    "after the import": ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'\n", []),
    "another library": ("import os\nimport json\nos.environ['A'] = '1'\n", ["A"]),
    "update": ("import os\nos.environ.update({'A': '1', **x}, B='2')\n", ["A", UNKNOWN, "B"]),
    "deleted": ("import os\ndel os.environ['A']\nos.environ.pop('B', None)\n", ["A", "B"]),
    "torch in a try": ("import os\ntry:\n    import torch\nexcept ImportError:\n    pass\nos.environ['A'] = '1'\n", []),
    "its own module": ("import settings\nimport torch\n", ["S"]),
    "no Python": ("this is {\n", []),
}  # fmt: skip


@pytest.mark.parametrize(("source", "names"), SOURCES.values(), ids=SOURCES)
def test_what_a_script_sets_before_torch(source, names, tmp_path):
    (tmp_path / "settings.py").write_text("import os\nos.environ['S'] = '1'\n")
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/inner.py").write_text("import os\nos.environ['P'] = '1'\n")
    (tmp_path / "script.py").write_text(source)
    assert list(set_before_torch(tmp_path / "script.py", tmp_path)) == names


TRAINS = {
    "import torch.distributed as dist\nimport numpy.linalg, os\nfrom torch import nn\ndist.barrier()\n": False,
    "import time\ntime.sleep(1)\n": False,
    "import torch\ntorch.optim.SGD(p, 0.1)\n": True,
    "from torch.nn.parallel import DistributedDataParallel as DDP\n": True,
    "import torch, model\n": True,
    "from . import model\n": True,
    "def main():\n    import lightning\n": True,
    "this is {\n": True,
}


@pytest.mark.parametrize("source", TRAINS)
def test_whether_a_script_may_train(source, tmp_path):
    (tmp_path / "script.py").write_text(source)
    assert may_train(tmp_path / "script.py") is TRAINS[source]


def test_a_pipe_and_a_file_that_is_not_there_are_not_read(tmp_path):
    assert set_before_torch(tmp_path / "script.py", tmp_path) == ()
    os.mkfifo(tmp_path / "script.py")
    assert may_train(tmp_path / "script.py")
    assert set_before_torch(tmp_path / "script.py", tmp_path) == ()


@pytest.mark.parametrize(
    "text",
    ["garbage", "[]", '{"A": 1}', "", "[" * 60_000, '{"A": "\\u0000"}', '{"A=B": ""}', '{"": ""}', '{"A": "\\ud800"}'],
)
def test_what_is_no_such_object_is_refused(text):
    with pytest.raises(ValueError, match=names.JOB_ENV):
        job_env.unpack({names.JOB_ENV: text})


def test_nothing_to_carry_is_no_variable():
    assert job_env.pack({}) == {}
    assert job_env.unpack({"A": "b"}) == {"A": "b"}
