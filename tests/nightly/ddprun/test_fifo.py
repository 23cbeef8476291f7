"""A FIFO in the place of any file of a node's folder keeps nobody who looks waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("node.log", "rank-0.log", "events.jsonl", "node.json", "outcome.json", "history.csv")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("logs",), 66, ""),
        (("logs", "--rank=0"), 66, ""),
        (("show",), 0, {"alive": False, "node": None, "outcome": None}),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else "",
)
def test_a_fifo_is_passed_over(tmp_path: Path, words: tuple[str, ...], code: int, said: object) -> None:
    node = tmp_path / "node-0"
    node.mkdir()
    for name in NAMES:
        os.mkfifo(node / name)
    where = tmp_path if words[0] == "logs" else node
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddprun.nodectl", *words, str(where)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (code, "")
    if said:
        found = json.loads(done.stdout)
        assert {key: found[key] for key in said} == said  # type: ignore[union-attr, attr-defined]
