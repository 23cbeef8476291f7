"""``ddpctl pull`` from real sshds on the loopback: cut off, gone on with, verified."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from bench.measuring import free_port
from tests.cluster.ssh_lab import MISSING, PACKAGES, PATH, Box, Person, box
from tests.e2e.driver import wait_until

from ddpctl.job.spec import JobSpec
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "")

PIECE = 1 << 22
BUFFERED = 1 << 17  # of a piece, by the programs that it goes through
# What a host sends of a checkpoint stops after a piece until the file `go` is there.
TAIL = f"""#!/bin/sh
case $3 in *.pt) ;; *) exec /usr/bin/tail "$@" ;; esac
/usr/bin/tail "$@" | {{
  /usr/bin/head -c {PIECE}
  while [ ! -e "$HOME/go" ]; do sleep 0.05; done
  cat
}}
"""


@dataclass
class Lab:
    """A run that has ended on two hosts."""

    boxes: list[Box]
    environ: dict[str, str]
    output: Path

    @property
    def run(self) -> list[Path]:
        return [host.home / ".ddpctl/runs/night" for host in self.boxes]

    def start(self, *args: str) -> subprocess.Popen[str]:
        argv = (sys.executable, "-P", "-m", "ddpctl", "pull", "night", *args)
        return subprocess.Popen(argv, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def pull(self, *args: str) -> tuple[int, str]:
        process = self.start(*args)
        _, stderr = process.communicate(timeout=300)
        return process.returncode, stderr

    def pulled(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.output)): path.read_bytes()
                for path in self.output.rglob("*") if path.is_file()}  # fmt: skip

    def inodes(self) -> dict[Path, int]:
        return {path: path.stat().st_ino for path in self.output.rglob("*") if path.is_file()}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    person = Person(tmp_path / "me")
    tail = tmp_path / "bin" / "tail"
    tail.parent.mkdir()
    tail.write_text(TAIL)
    tail.chmod(0o755)
    with ExitStack() as stack:
        boxes = [
            stack.enter_context(
                box(tmp_path / name, person, address="127.0.0.1", port=free_port(),
                    environ={"PATH": f"{tail.parent}:{PATH}"})
            )
            for name in ("box1", "box2")
        ]  # fmt: skip
        record = Run(
            name="night",
            created=time.time(),
            target="boxes",
            kind="ssh",
            options={"hosts": [{"address": host.address, "port": host.port} for host in boxes], "runtime": "none"},
            job=JobSpec(nodes="2"),
            cwd="/",
            folder=str(run_store.create(tmp_path / "runs", "night")),
            checkpoint_dir="127.0.0.1:~/.ddpctl/runs/night/checkpoints",
            version="test",
            handle={"logs": "ddpctl logs night"},
        )
        run_store.save(record)
        environ = {"HOME": str(person.home), "PATH": PATH, "DDPCTL_STATE_DIR": str(tmp_path / "runs"),
                   "PYTHONPATH": PACKAGES}  # fmt: skip
        lab = Lab(boxes, environ, Path(record.folder, run_store.PULLED))
        for node, folder in enumerate(lab.run):
            here = f"node-{node}"
            for name in (
                "project/train.py",
                "secrets",
                "store.secret",
                f"{here}/ddprun.lock",
            ):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text("not a result")
            (folder / f"node-{node}/node.log").write_text(f"node {node}\n" * 100)
            (folder / "checkpoints").mkdir()
            (folder / "out/project").mkdir(parents=True)
            (folder / "out/project/metrics").write_text("a result")
        yield lab
        for host in boxes:
            (host.home / "go").touch()


def test_a_pull_that_is_cut_off_twice_goes_on_and_is_verified(lab: Lab) -> None:
    checkpoints = lab.run[0] / "checkpoints"
    weights = os.urandom(5 * PIECE)
    (checkpoints / "step-00000002.pt").write_bytes(weights)
    (checkpoints / "it's [odd] é").write_bytes(b"odd")
    (checkpoints / "newest").symlink_to("step-00000002.pt")
    (lab.boxes[1].home / "go").touch()
    part = lab.output / "checkpoints/.step-00000002.pt.part"
    for number, end in enumerate((signal.SIGINT, signal.SIGKILL), 1):
        process = lab.start()
        end_of_piece = number * (PIECE - BUFFERED)
        wait_until(lambda n=end_of_piece: part.exists() and part.stat().st_size >= n, "a piece", timeout_s=180)  # type: ignore[misc]
        code, stderr = lab.pull()
        assert (code, "'night'" in stderr) == (69, True), stderr
        process.send_signal(end)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == (130 if end == signal.SIGINT else -end), stderr
        assert number * (PIECE - BUFFERED) <= part.stat().st_size <= number * PIECE
    with part.open("r+b") as file:
        file.write(bytes(byte ^ 1 for byte in weights[:1]))  # it is seen, and fetched again
    (lab.boxes[0].home / "go").touch()
    code, stderr = lab.pull()
    assert code == 0, stderr
    assert "127.0.0.1:checkpoints/newest" in stderr  # a symbolic link
    wanted = {
        "checkpoints/step-00000002.pt": weights,
        "checkpoints/it's [odd] é": b"odd",
        "node-0/node.log": b"node 0\n" * 100,
        "node-1/node.log": b"node 1\n" * 100,
        "out/project/metrics": b"a result",
    }
    assert lab.pulled() == wanted
    fetched = lab.inodes()
    code, stderr = lab.pull()
    assert (code, lab.inodes()) == (0, fetched), stderr  # nothing is fetched again

    lab.boxes[1].kill()
    (lab.run[0] / "node-0/node.log").write_text("more\n")
    code, stderr = lab.pull()
    assert (code, lab.pulled()) == (69, wanted | {"node-0/node.log": b"more\n"}), stderr


def test_the_best_checkpoint_alone(lab: Lab) -> None:
    for host in lab.boxes:
        (host.home / "go").touch()
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        name = lab.run[0] / f"checkpoints/step-{step:08}"
        name.with_suffix(".pt").write_text(f"step {step}")
        name.with_suffix(".json").write_text(json.dumps({"accuracy": accuracy}))
    code, stderr = lab.pull("--best")
    assert code == 0, stderr
    assert [path for path in sorted(lab.pulled()) if path.endswith(".pt")] == ["checkpoints/step-00000002.pt"]
    assert lab.pull()[0] == 0
    assert sum(path.endswith(".pt") for path in lab.pulled()) == 3
