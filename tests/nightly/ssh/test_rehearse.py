"""A rehearsal of a real script on a host: what comes back, and that nothing is left there."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests.cluster.ssh_lab import MISSING, PACKAGES, Box, Person, box
from tests.e2e.driver import wait_until
from tests.nightly.rehearse.test_rehearse import script_of

pytestmark = [pytest.mark.skipif(bool(MISSING), reason=MISSING or ""), pytest.mark.timeout(900)]
CONFIG = """\
targets:
  boxes: {{kind: ssh, runtime: none, python: "{}", project: sync, hosts: ["{}:{}"]}}
"""
REHEARSE = ("rehearse", "--target", "boxes", "--nodes", "1", "--gpus", "2", "--json")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Box]:
    for name in ("project", "temporary"):
        (tmp_path / name).mkdir()
    person, environ = Person(tmp_path / "me"), {"TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"}
    with box(tmp_path / "box", person, address="127.0.0.2", port=free_port(), environ=environ) as made:
        (tmp_path / "project/ddpctl.yaml").write_text(CONFIG.format(sys.executable, made.address, made.port))
        yield made


def start(folder: Path, script: str, *flags: str) -> "subprocess.Popen[str]":
    (folder / "project/train.py").write_text(script_of(script))
    env = {"HOME": str(folder / "me"), "PATH": "/usr/bin:/bin", "PYTHONPATH": PACKAGES}
    env["DDPCTL_STATE_DIR"] = str(folder / "runs")
    argv = [sys.executable, "-P", "-m", "ddpctl", *REHEARSE, *flags, "--", "train.py"]
    return subprocess.Popen(
        argv, cwd=folder / "project", env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def remaining(folder: Path, host: Box) -> list[str]:
    """Return what a rehearsal has left. Each import of torch makes an empty folder for its compiler."""
    places = (folder / "temporary", folder / "runs", host.home / ".ddpctl/runs")
    names = [path.name for place in places for path in place.glob("[!.]*") if not path.name.startswith("torchinductor")]
    marks = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return names + [str(mark) for mark in marks if str(folder / "temporary").encode() in mark]


def test_a_fault_is_named_as_on_this_machine(tmp_path: Path, host: Box) -> None:
    with start(tmp_path, "optimizer_lost", "--only", "kill-rank") as process:
        stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 1, stderr
    rows = json.loads(stdout)["rows"]
    assert [row["id"] for row in rows if row["verdict"] == "fault"] == ["resume-optimizer"]
    assert remaining(tmp_path, host) == []


def test_ctrl_c_ends_it_there_and_says_what_is_known(tmp_path: Path, host: Box) -> None:
    with start(tmp_path, "sound_plain") as process:
        rank = "ddpctl-rehearse-*/run-1/facts/*.*"
        wait_until(lambda: process.poll() is not None or any((tmp_path / "temporary").glob(rank)), "a rank")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    rows = {row["id"]: row["verdict"] for row in json.loads(stdout)["rows"]}
    assert (rows["group"], rows["repeatable"]) == ("ok", "unknown")
    assert remaining(tmp_path, host) == []


def test_a_path_that_the_host_does_not_have_is_named(tmp_path: Path, host: Box) -> None:
    with start(tmp_path, "sound_plain", "--link", "images") as process:
        _, stderr = process.communicate(timeout=300)
    assert process.returncode == 66
    assert "images: no such file" in stderr
    assert {*remaining(tmp_path, host)} == {path.name for path in (tmp_path / "runs").glob("rehearse-*")}  # for its log
