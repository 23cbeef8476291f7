"""What a person hears while torch is imported: by ddprun itself, which has no thread then, and by its keeper."""

import os
import re
from itertools import groupby

import pytest

from ddprun import progress
from ddprun.progress import Progress

# As on a busy machine: ddprun's imports take 6 s each, and the keeper's goes on until somebody has said so.
SLOW = """
import os, sys, time
from pathlib import Path

class Slow:
    def find_spec(self, name, *_):
        if name in seen:
            return
        seen.add(name)
        if name in ("torch.nn", "torch.distributed.elastic.agent.server.api"):
            time.sleep(6)
        said, until = Path(os.environ["TEST_STDERR"]).read_text, time.monotonic() + 200
        while name == "torch._dynamo" and "what the ranks need" not in said() and time.monotonic() < until:
            time.sleep(0.1)

seen = set()
sys.meta_path.insert(0, Slow())
"""


def test_a_line_after_5_s_and_then_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [100.0], list[str]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    wait = Progress(said.append, "importing torch")
    for _ in range(150):
        now[0] += 1
        wait.look()
    assert said == [f"importing torch, {seconds} s so far" for seconds in (5, 10, 20, 40, 70, 100, 130)]


@pytest.mark.parametrize(
    ("options", "imports"),
    [((), ["torch", "torch elastic", "what the ranks need of torch"]), (("--exec",), ["torch"])],
)
def test_a_slow_import_is_told(runs, tmp_path, options, imports) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    env = {"PYTHONPATH": path, "TEST_STDERR": str(tmp_path / "0.0.err")}
    node = runs.start("act.py", "all=0", options=options, env=env)
    assert node.end(timeout_s=300) == 0
    lines = [re.sub(r"\d+ s so far", "N s so far", line) for line in node.stderr.read_text().splitlines()]
    assert [line for line, _ in groupby(lines) if "metrics at" not in line] == [
        *(f"[node0] importing {what}, N s so far" for what in imports),
        "[node0] rank 0 of 1 started (attempt 1)",
    ]
