"""What a script sets before it imports torch: read from its source, and the same as under python."""

import os
import re
import subprocess
import sys

import pytest
from tests.nightly.ddprun.supervised import run_ranks
from tests.unit.ddprun import test_script_environment

from ddprun.settings.script_environment import UNKNOWN

# name: a value, what shows its effect. Those that are read later have it also in a forked rank.
EXECUTED = {
    "OMP_NUM_THREADS": ("3", "torch.get_num_threads()"),
    "TORCH_COMPILE_DISABLE": ("1", "__import__('torch._dynamo.config', fromlist=['x']).disable"),
    "PYTORCH_JIT": ("0", "torch.jit._state._enabled.enabled"),
}
LOGS = {  # alone: with an import of torch._dynamo, as above, it has log lines of its own
    "TORCH_LOGS": ("+dynamo", "__import__('logging').getLogger('torch._dynamo').level")
}
FORKED = {"TMPDIR": ("FOLDER", "__import__('tempfile').gettempdir()"), "TORCH_HOME": ("FOLDER", "torch.hub.get_dir()")}


@pytest.mark.parametrize("effects", [EXECUTED, LOGS, FORKED], ids=["executed", "logs", "forked"])
def test_a_variable_has_the_effect_that_it_has_under_python(runs, effects, tmp_path):
    lines = [f"os.environ['{name}'] = '{value}'" for name, (value, _) in effects.items()]
    shows = [f"print({expression})" for _, expression in effects.values()]
    script = tmp_path / "script.py"
    script.write_text("\n".join(["import os", *lines, "import torch", *shows]).replace("FOLDER", str(tmp_path)))
    plain = subprocess.run(
        [sys.executable, str(script)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=240, check=True,
    )  # fmt: skip
    node = runs.start(str(script), env={"OMP_NUM_THREADS": "1"})
    assert node.end() == 0
    assert node.log(0) == plain.stdout
    reason = (
        r"\[node0\] from now on, ranks are started with exec, because the script sets (.*) before it imports torch "
    )
    reason += r"\(exec is slower than fork\)"
    named = [match[1].split(", ") for line in node.messages() if (match := re.fullmatch(reason, line))]
    assert [sorted(names) for names in named] == ([] if effects is FORKED else [sorted(effects)])


def test_what_the_source_does_not_show_is_said_at_the_first_import_of_torch(tmp_path):
    """As by an installed package; until then torch is not there, as in an executed rank."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/settings.py").write_text(
        "import os\nos.environ |= {'OMP_NUM_THREADS': '3', 'NCCL_DEBUG': 'INFO'}\n"
    )
    (tmp_path / "script.py").write_text(
        f"import sys\nbefore = [*sys.modules]\nsys.path.append('{tmp_path}/site')\nimport settings\n"
        "from torch.utils.data import DataLoader\nimport torch\n"
        "print([name for name in before if name.partition('.')[0] == 'torch'])\n"
        "print(torch.__spec__.loader is torch.__loader__)\n"
        "print(sys.modules['torch'] is torch, sys.modules[DataLoader.__module__].DataLoader is DataLoader)\n"
    )
    (((output, status),), plain) = run_ranks("fork", [[["script.py"], {"LOCAL_RANK": "0"}]], tmp_path)
    assert (status, plain) == (0, [])
    assert output.splitlines() == [
        "ddprun: OMP_NUM_THREADS changed before the import of torch, in code that ddprun does not read: "
        "this has no effect, because torch was imported once for all ranks; use --exec",
        "[]",
        "True",
        "True True",
    ]


MORE_SOURCES = {
    "a library that imports it": ("import os\nimport torchvision.models\nos.environ['A'] = '1'\n", []),
    "read, not set": ("import os\nprint(os.environ['A'], os.environ.get('B'), os.getenv('C'))\n", []),
    "update with dict": ("import os\nos.environ.update(dict(A='1'))\n", ["A"]),
    "or": ("import os\nos.environ |= {'A': '1'}\n", ["A"]),
    "putenv": ("import os\nos.putenv('A', '1')\n", ["A"]),
    "another name": ("import os as o\no.environ['A'] = '1'\n", ["A"]),
    "dotenv": ("from dotenv import load_dotenv\nload_dotenv()\nimport torch\n", [UNKNOWN]),
    "in an if": ("import os\nif 'A' not in os.environ:\n    os.environ['A'] = '1'\nimport torch\n", ["A"]),
    "torch in a function": ("import os\ndef f():\n    import torch\nos.environ['A'] = '1'\n", ["A"]),
    "torch for types": (
        "import os, typing\nif typing.TYPE_CHECKING:\n    import torch\nos.environ['A'] = '1'\n",
        ["A"],
    ),
    "in a function below": ("import os\nimport torch\ndef f():\n    os.environ['A'] = '1'\n", []),
    "its own package": ("from package.inner import x\nimport torch\n", ["P"]),
    "its own module, too late": ("import torch\nimport settings\n", []),
    "its own module imports torch": ("import model\nimport settings\n", []),
    "from torch": ("import os\nfrom torch import nn\nos.environ['A'] = '1'\n", []),
    "read later": ("import os\nos.environ['MASTER_PORT'] = '1'\nos.environ['NCCL_DEBUG'] = 'INFO'\n", []),
    "setdefault": ("from os import environ\nenviron.setdefault('A', '1')\n", ["A"]),
    "a variable name": ("import os\nfor key in keys:\n    os.environ[key] = '1'\n", [UNKNOWN]),
    "in a function above": ("import os\ndef f():\n    os.environ['A'] = '1'\nf()\nimport torch\n", ["A"]),
}


@pytest.mark.parametrize(("source", "names"), MORE_SOURCES.values(), ids=MORE_SOURCES)
def test_what_a_script_sets_before_torch(source, names, tmp_path):
    test_script_environment.test_what_a_script_sets_before_torch(source, names, tmp_path)
