"""The fake node against the real ddprun: with the same arguments, the same files, keys, events and answers."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests import forks

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FAKE = os.pathsep.join(map(str, (HERE, ROOT / "trainer")))
CASES: Mapping[str, tuple[tuple[str, ...], signal.Signals | None, int]] = {
    "succeeded": (("steps=2",), None, 0),
    "failed": (("steps=2", "exit=3@1"), None, 3),
    "stopped": (("steps=2", "wait"), signal.SIGTERM, 143),
    "interrupted": (("steps=2", "wait"), signal.SIGINT, 130),
    "saved on USR1": (("steps=2", "wait"), signal.SIGUSR1, 138),
}


def environment(folder: Path) -> dict[str, str]:
    run = folder / "night"
    return {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1", "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1", "DDP_RUN_ID": "night",
        "DDP_RUN_UID": "c0ffee", "DDP_RUN_DIR": str(run), "DDP_CHECKPOINT_DIR": str(run / "checkpoints"),
        "DDP_DEVICE": "cpu", "DDP_TARGETS_DIR": str(folder / ".targets"), "DDP_LAUNCHER": "local",
    }  # fmt: skip


def run_node(folder: Path, *, real: bool, script: tuple[str, ...], number: signal.Signals | None) -> int:
    folder.mkdir()
    arguments = ["-m", "ddprun", "--master-port", "0", "--grace", "30", str(HERE / "train.py"), *script]
    with (folder / "console").open("wb") as console:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": console, "stderr": console, "cwd": folder}
        if real:
            arguments[2:4] = []  # a single node chooses its port
            node = forks.start(arguments, env=environment(folder), **streams)
        else:
            env = environment(folder) | {"PYTHONPATH": FAKE}
            node = subprocess.Popen([sys.executable, "-P", *arguments], env=env, **streams)
    deadline = time.monotonic() + 120
    while number and not all(text(folder, f"rank-{rank}.log").count("step 2") for rank in (0, 1)):
        assert time.monotonic() < deadline, (folder / "console").read_text()
        time.sleep(0.02)
    if number:
        node.send_signal(number)
    return int(node.wait(120))


def text(folder: Path, name: str) -> str:
    path = folder / "night/node-0" / name
    return path.read_text() if path.exists() else ""


def files(folder: Path) -> set[str]:
    """Return the names of a node's files, but for those of a rank that exist only once it has printed."""
    node = folder / "night/node-0"
    return {str(path.relative_to(node)) for path in node.rglob("*") if not path.match("timed/rank-*.log")}


def events(folder: Path) -> dict[str, set[str]]:
    lines = map(json.loads, text(folder, "events.jsonl").splitlines())
    return {line["event"]: {*line} for line in lines}


def answer(folder: Path, *arguments: str) -> Any:
    """Ask the real nodectl."""
    done = forks.run(["-m", "ddprun.nodectl", *arguments], env={}, text=True)
    return done.returncode, done.stdout


def keys(value: Any) -> Any:
    """Return a JSON value with the names of types in place of its values."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return [keys(item) for item in value[:1]] if isinstance(value, list) else type(value).__name__


@pytest.mark.parametrize("case", CASES)
def test_the_fake_node_leaves_what_a_real_one_leaves(case: str, tmp_path: Path) -> None:
    script, number, code = CASES[case]
    fake, real = tmp_path / "fake", tmp_path / "real"
    for folder in (fake, real):
        assert run_node(folder, real=folder == real, script=script, number=number) == code, text(
            folder, "../../console"
        )
    assert files(fake) == files(real)
    ends = [json.loads(text(folder, "outcome.json")) | {"message": ""} for folder in (fake, real)]
    if number:  # the ranks end at the same time
        assert {end.pop("rank") for end in ends} <= {0, 1}
    assert ends[0] == ends[1]
    for name in ("node.json", "outcome.json"):
        assert keys(json.loads(text(fake, name))) == keys(json.loads(text(real, name)))
    assert json.loads(text(fake, "node.json"))["state"] == json.loads(text(real, "node.json"))["state"]
    assert json.loads(text(fake, "environment.json")).keys() <= json.loads(text(real, "environment.json")).keys()
    known, seen = events(real), events(fake)
    assert {name: sorted(seen[name]) for name in seen if name in known} == {
        name: sorted(known[name] - {"step", "seconds"} | (seen[name] & {"step", "seconds"}))
        for name in seen
        if name in known
    }
    assert {*seen} - {*known} <= {"checkpoint_saved"}
    assert [*csv.reader(text(fake, "history.csv").splitlines()[:1])] == [
        *csv.reader(text(real, "history.csv").splitlines()[:1])
    ]
    series = [{line.partition(" ")[0] for line in text(folder, "metrics.prom").splitlines()} for folder in (fake, real)]
    assert series[0] <= series[1]
    shown = [json.loads(answer(folder, "show", str(folder / "night/node-0"))[1]) for folder in (fake, real)]
    assert keys(shown[0]) == keys(shown[1])
    for arguments in (("--rank", "1"), ("--rank", "9"), ("--tail", "1", "--rank", "0"), ("--file", "rank-1.log")):
        assert answer(fake, "logs", *arguments, str(fake / "night")) == answer(
            real, "logs", *arguments, str(real / "night")
        )
