"""The benchmarks run, in their smallest form, and say what they found; their numbers are not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[1] / "bench"


def test_startup(tmp_path):
    found = tmp_path / "startup.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / "startup.py"), "--repeats", "1", "--kills", "1", "--json", str(found)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(found.read_text())
    rows = {name: f"{values[0]:7.2f}" * 3 + "   1" for name, values in result["seconds"].items()}
    assert done.stdout.splitlines()[1:] == [
        "seconds                      median    min    max   n",
        *(f"{name:28}{row}" for name, row in rows.items()),
        f"first step, ddprun / torchrun: {result['ratio']:.2f} (goal: at most 0.45)",
    ]
    assert all(0 < values[0] < 240 for values in result["seconds"].values())
