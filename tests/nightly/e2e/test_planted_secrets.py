"""A secret of a job is in nothing that real nodes and ranks write or show (docs/results/secrets.md)."""

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from bench.measuring import runtime_files
from tests.e2e.driver import DDPCTL, ddpctl, is_over, processes_of, wait_until
from tests.nightly.ddprun.terminal import Session

TOKEN, PASSWORD = "canary7Xq2", "canary9Pw4"
HIDDEN = (TOKEN.encode(), PASSWORD.encode())
JOB = "job:\n  name: night\n  gpus: 2\n  device: cpu\n  secrets: [TOKEN, HOOK]\n  notify: [$HOOK]\n"
FAILING = """\
import os, time
import ddpwire.script as ddp
assert os.environ["TOKEN"] and os.environ["HOOK"]
ddp.progress(1, total=2)
if os.environ["RANK"] == "1":
    headers = {"Authorization": os.environ["TOKEN"]}
    raise RuntimeError(f"the service refused {len(headers)} headers")
time.sleep(600)
"""
PAGE = """\
import os, sys
import ddpwire.script as ddp
from torch import distributed as dist
dist.init_process_group("gloo")
for step in range(2, 6):
    dist.barrier()
    ddp.progress(step, total=6)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ddpctl.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", TOKEN)
    monkeypatch.setenv("HOOK", f"jsons://user:{PASSWORD}@127.0.0.1:9/{TOKEN}")


def leaks(*places: tuple[str, bytes]) -> list[str]:
    return [name for name, data in places if any(value in data for value in HIDDEN)]


def files(*folders: Path) -> Iterator[tuple[str, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            with suppress(OSError):
                if path.is_file():
                    yield str(path), path.read_bytes()


def command_lines() -> Iterator[tuple[str, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield str(path), path.read_bytes()


def outputs(*argv: str, code: int | None = 0) -> list[tuple[str, bytes]]:
    done: subprocess.CompletedProcess[str] = ddpctl(*argv)
    assert code is None or done.returncode == code, (argv, done.stderr)
    return [(f"{argv[0]}: stdout", done.stdout.encode()), (f"{argv[0]}: stderr", done.stderr.encode())]


def test_of_a_training_that_is_watched_and_stopped(tmp_path: Path) -> None:
    assert (
        ddpctl(
            "launch", "--detach", "--name", "night", "--", "--epochs", "100000", "--checkpoint-every", "20"
        ).returncode
        == 0
    )
    try:
        wait_until(lambda: list((tmp_path / "runs/night/checkpoints").glob("step-*.json")), "a checkpoint")
        state = json.loads((tmp_path / "runs/night/node-0/node.json").read_text())
        environ = Path(f"/proc/{state['ranks'][1]['pid']}/environ").read_bytes()
        assert all(value in environ for value in HIDDEN)
        with urllib.request.urlopen(state["metrics"], timeout=5) as answer:  # noqa: S310
            places = [("metrics", answer.read())]
        (beat,) = runtime_files(tmp_path / "runs/night", "heartbeat/rank-0")
        places += [*command_lines(), *files(beat.parents[1])]
        for argv in (
            ("explain", "night", "--json"), ("profile", "night", "--seconds", "1", "-o", "trace.json"),
            ("status", "night", "--json"), ("top", "night", "--once", "--json"), ("logs", "night"),
        ):  # fmt: skip
            places += outputs(*argv)
    finally:
        ddpctl("stop", "night")
    places += outputs("report", "night", "--output", "page.html")
    places += outputs("timeline", "night", "--json")
    places += outputs("export", "night", "weights.pt")
    assert processes_of("night") == {}
    searched = dict(files(tmp_path))
    names = {Path(name).name for name in searched}
    assert {"run.json", "events.jsonl", "node.json", "outcome.json", "page.html", "trace.json", "weights.pt"} <= names
    assert any(name.startswith("step-") for name in names)
    assert leaks(*places, *searched.items()) == []


def test_of_a_rank_that_fails_and_a_notice_that_is_not_delivered(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    places = outputs("launch", "--name", "night", "--max-restarts", "0", "--", "train.py", code=1)
    notices = json.loads((tmp_path / "runs/night/node-0/node.json").read_text())["notices"]
    assert [(notice["to"], notice["state"]) for notice in notices] == [("$HOOK", "failed")]
    for argv in (("explain", "night", "--json"), ("status", "night", "--json"), ("report", "night")):
        places += outputs(*argv)
    assert any(b"the service refused 1 headers" in data for _, data in files(tmp_path))
    assert leaks(*places, *files(tmp_path)) == []


def test_of_checks_and_rehearsals(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PAGE)
    places = outputs("doctor", "--json", code=None)
    places += outputs("rehearse", "--only", "term", "--json", "--", "train.py", code=None)
    assert leaks(*places, *files(tmp_path)) == []


def test_of_a_terminal_and_its_title(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\nassert os.environ['TOKEN']\n")
    terminal = Session([*DDPCTL, "launch", "--name", "night", "--", "train.py"])
    terminal.wait_for("succeeded", timeout_s=120)
    assert terminal.end() == 0
    wait_until(lambda: is_over("night"), "the end")
    assert leaks(("terminal", terminal.everything.encode()), *files(tmp_path)) == []
