"""A FIFO in the place of any file of a node's folder keeps nobody who looks waiting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("node.log", "rank-0.log", "events.jsonl", "node.json", "outcome.json", "history.csv")


@pytest.mark.parametrize(
    ("arguments", "code", "status"),
    [
        (("logs",), 66, ""),
        (("logs", "--rank=0"), 66, ""),
        (("show",), 0, {"alive": False, "node": None, "outcome": None}),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, tuple) else "",
)
def test_a_fifo_is_passed_over(tmp_path: Path, arguments: tuple[str, ...], code: int, status: object) -> None:
    node = tmp_path / "node-0"
    node.mkdir()
    for name in NAMES:
        os.mkfifo(node / name)
    folder = tmp_path if arguments[0] == "logs" else node
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ddprun.nodectl", *arguments, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, "")
    if status:
        answer = json.loads(done.stdout)
        assert {key: answer[key] for key in status} == status  # type: ignore[union-attr, attr-defined]
