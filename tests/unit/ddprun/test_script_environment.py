"""What a script sets before it imports torch, and the variables of a job that ddprun is given in one."""

import os

import pytest

from ddprun.settings.script_environment import UNKNOWN, may_train, set_before_torch
from ddpwire import job_env, names

SOURCES = {
    "item": ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", ["OMP_NUM_THREADS"]),
    "after the import": ("import os, torch\nos.environ['OMP_NUM_THREADS'] = '1'\n", []),
    "from torch": ("import os\nfrom torch import nn\nos.environ['A'] = '1'\n", []),
    "a library that imports it": ("import os\nimport torchvision.models\nos.environ['A'] = '1'\n", []),
    "another library": ("import os\nimport json\nos.environ['A'] = '1'\n", ["A"]),
    "read later": ("import os\nos.environ['MASTER_PORT'] = '1'\nos.environ['NCCL_DEBUG'] = 'INFO'\n", []),
    "read, not set": ("import os\nprint(os.environ['A'], os.environ.get('B'), os.getenv('C'))\n", []),
    "update": ("import os\nos.environ.update({'A': '1', **x}, B='2')\n", ["A", UNKNOWN, "B"]),
    "update with dict": ("import os\nos.environ.update(dict(A='1'))\n", ["A"]),
    "or": ("import os\nos.environ |= {'A': '1'}\n", ["A"]),
    "setdefault": ("from os import environ\nenviron.setdefault('A', '1')\n", ["A"]),
    "putenv": ("import os\nos.putenv('A', '1')\n", ["A"]),
    "deleted": ("import os\ndel os.environ['A']\nos.environ.pop('B', None)\n", ["A", "B"]),
    "another name": ("import os as o\no.environ['A'] = '1'\n", ["A"]),
    "a variable name": ("import os\nfor key in keys:\n    os.environ[key] = '1'\n", [UNKNOWN]),
    "dotenv": ("from dotenv import load_dotenv\nload_dotenv()\nimport torch\n", [UNKNOWN]),
    "in an if": ("import os\nif 'A' not in os.environ:\n    os.environ['A'] = '1'\nimport torch\n", ["A"]),
    "torch in a try": ("import os\ntry:\n    import torch\nexcept ImportError:\n    pass\nos.environ['A'] = '1'\n", []),
    "torch in a function": ("import os\ndef f():\n    import torch\nos.environ['A'] = '1'\n", ["A"]),
    "torch for types": (
        "import os, typing\nif typing.TYPE_CHECKING:\n    import torch\nos.environ['A'] = '1'\n", ["A"]),
    "in a function above": ("import os\ndef f():\n    os.environ['A'] = '1'\nf()\nimport torch\n", ["A"]),
    "in a function below": ("import os\nimport torch\ndef f():\n    os.environ['A'] = '1'\n", []),
    "its own module": ("import settings\nimport torch\n", ["S"]),
    "its own package": ("from package.inner import x\nimport torch\n", ["P"]),
    "its own module, too late": ("import torch\nimport settings\n", []),
    "its own module imports torch": ("import model\nimport settings\n", []),
    "no Python": ("this is {\n", []),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_what_a_script_sets_before_torch(name, tmp_path):
    source, names = SOURCES[name]
    (tmp_path / "settings.py").write_text("import os\nos.environ['S'] = '1'\n")
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/inner.py").write_text("import os\nos.environ['P'] = '1'\n")
    (tmp_path / "script.py").write_text(source)
    assert list(set_before_torch(tmp_path / "script.py", tmp_path)) == names


def test_a_file_that_is_not_there(tmp_path):
    assert set_before_torch(tmp_path / "script.py", tmp_path) == ()


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


def test_a_pipe_is_not_read(tmp_path):
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
