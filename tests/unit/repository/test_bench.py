"""Every module of bench/ can be imported, and so can what its scripts import."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[3] / "bench"
RANKS = ("first_step",)  # scripts of ranks, which train when they are imported
# In a process of its own: some import torch's compiler, whose native libraries may report leaks at the end.
IMPORT = """
import json, sys, traceback
errors = {}
for name, code in json.load(sys.stdin).items():
    try:
        exec(code, {})
    except Exception:
        errors[name] = traceback.format_exc()
print(json.dumps(errors))
"""


def imports_of(path: Path) -> str:
    """Return the code that imports a module, or what a script imports."""
    if path.parent == BENCH and path.stem not in RANKS:
        return f"import {path.stem}"
    lines = ast.parse(path.read_text()).body
    return "\n".join(ast.unparse(line) for line in lines if isinstance(line, ast.Import | ast.ImportFrom))


def test_every_benchmark_can_be_imported() -> None:
    code = {str(path): imports_of(path) for path in BENCH.rglob("*.py")}
    env = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "PYTHONPATH": os.pathsep.join([str(BENCH), str(BENCH.parent), *sys.path]),
    }
    line = [sys.executable, "-c", IMPORT]
    done = subprocess.run(
        line, input=json.dumps(code), env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=200
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {}
