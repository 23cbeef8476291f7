"""ddpctl rehearse on two small scripts: one is sound, the other has one fault."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.driver import DDPCTL, ddpctl, wait_until
from tests.nightly.rehearse.test_rehearse import script_of

ONE_NODE = ("--nodes", "1", "--gpus", "2")


def rehearse(tmp_path: Path, name: str, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    (tmp_path / "train.py").write_text(script_of(name))
    done = ddpctl("rehearse", *ONE_NODE, *flags, "--json", "--", "train.py", cwd=tmp_path)
    assert done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    return done.returncode, {row["id"]: row for row in json.loads(done.stdout)["rows"]}


def test_a_sound_script_has_no_fault(tmp_path: Path) -> None:
    code, rows = rehearse(tmp_path, "sound_plain", "--only", "term")
    assert code == 0
    assert {name for name, row in rows.items() if row["verdict"] != "ok"} == {
        "samples",
        "order",
    }  # without a DataLoader
    assert {"save-term", "resume-optimizer", "same-checkpoint", "ranks"} <= {*rows}


def test_a_script_that_asks_for_gpus_is_run_on_cpus(tmp_path: Path) -> None:
    code, rows = rehearse(tmp_path, "needs_gpus", "--only", "term")
    assert (code, {row["verdict"] for row in rows.values()}) == (0, {"ok"})


def test_the_fault_of_a_script_is_named(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("job") / "ddpctl.yaml"
    file.write_text("job:\n  nodes: 3\n  spares: 1\n  checkpoint_copies: 2\n")  # not for this machine
    code, rows = rehearse(tmp_path, "optimizer_lost", "--only", "kill-rank", "--file", str(file))
    assert code == 1
    assert {name for name, row in rows.items() if row["verdict"] == "fault"} == {"resume-optimizer"}
    assert rows["resume-optimizer"]["mend"]


def test_ctrl_c_leaves_nothing_and_says_what_is_known(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (tmp_path / "train.py").write_text(script_of("sound_plain"))
    temporary = tmp_path_factory.mktemp("temporary")
    command = [*DDPCTL, "rehearse", *ONE_NODE, "--json", "--", "train.py"]
    environ = {**os.environ, "TMPDIR": str(temporary)}
    abandoned = temporary / "ddpctl-rehearse-of-a-killed-process"
    abandoned.mkdir()
    (abandoned / "plan.json").write_text("{}")
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        wait_until(lambda: any(temporary.glob("*/run-1/facts/*.*")), "a rank")
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    rows = {row["id"]: row["verdict"] for row in json.loads(stdout)["rows"]}
    assert (process.returncode, rows["group"], rows["repeatable"]) == (130, "ok", "unknown")
    assert not any(temporary.iterdir())
    mark = f"{temporary}/"
    wait_until(lambda: not [line for line in command_lines() if mark in line], "the end of all processes")


def command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            lines.append(path.read_bytes().decode(errors="replace"))
    return lines
