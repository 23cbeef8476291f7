"""Progress lines while torch is imported: by ddprun itself, which has no thread then, and by its supervisor."""

import os
import re
from itertools import groupby

import pytest

# As on a busy machine: ddprun's imports take 6 s each, and the supervisor's last until the test has looked.
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
        seen_by_test, until = Path(os.environ["TEST_LOOKED"]).exists, time.monotonic() + 200
        while name == "torch._dynamo" and not seen_by_test() and time.monotonic() < until:
            time.sleep(0.1)

seen = set()
sys.meta_path.insert(0, Slow())
"""


@pytest.mark.parametrize("options", [(), ("--exec",)], ids=["fork", "exec"])
def test_a_slow_import_is_reported(runs, tmp_path, options) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    env = {"PYTHONPATH": path, "TEST_LOOKED": str(tmp_path / "looked")}
    script = tmp_path / "script.py"
    script.write_text("# optim: for this word, the supervisor imports torch._dynamo")
    node = runs.start(str(script), options=options, env=env)
    if not options:
        runs.until(lambda: "that the ranks need" in node.stderr.read_text())
        assert node.state().state == "starting", "all nodes have joined"
    (tmp_path / "looked").touch()
    assert node.end(timeout_s=300) == 0
    lines = [re.sub(r"\d+ s so far", "N s so far", line) for line in node.stderr.read_text().splitlines()]
    waits = [line for line, _ in groupby(lines) if line.endswith("N s so far")]
    assert len(waits) == (1 if options else 3)
