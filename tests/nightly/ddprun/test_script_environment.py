"""What a script sets before it imports torch: read from its source, and the same as under python."""

import os
import re
import subprocess
import sys

import pytest
from tests.nightly.ddprun.supervised import run_ranks

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
