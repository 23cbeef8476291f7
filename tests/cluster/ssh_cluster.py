"""A laptop and two SSH machines out of namespaces, and ddpctl on them. Needs root; the sshds are ssh_lab.py's."""

import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.lab import Machine, machines
from tests.cluster.ssh_lab import PACKAGES, Box, Person, box
from tests.e2e.driver import wait_until

CLI = (sys.executable, "-P", "-m", "ddpctl")


@dataclass
class Lab:
    """A laptop that may log in to two boxes."""

    folder: Path
    laptop: Machine
    machines: tuple[Machine, ...]
    boxes: tuple[Box, ...]
    person: Person
    variables: dict[str, str]

    def write(self, text: str = "", *, hosts: str | None = None, options: str = "") -> None:
        """A ddpctl.yaml for the boxes."""
        listed = hosts or f"[{', '.join(host.address for host in self.boxes)}]"
        (self.folder / "ddpctl.yaml").write_text(
            f"job: {{name: digits, nodes: 2, gpus: 2, device: cpu}}\n{text}target: boxes\ntargets:\n  boxes:\n"
            f"    kind: ssh\n    runtime: none\n    python: {sys.executable}\n    hosts: {listed}\n{options}"
        )

    def environ(self, **more: str) -> dict[str, str]:
        return {**self.variables, "DDPCTL_STATE_DIR": str(self.folder / "runs"), **more}

    def ddpctl(self, *args: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.laptop.command(*CLI, *args),
            env=self.environ(**more),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def start(self, *args: str, machine: Machine | None = None, **more: str) -> subprocess.Popen[bytes]:
        """Start an attached ddpctl in a session of its own. Its output goes to a file: nobody would read a pipe."""
        with (self.folder / "output.txt").open("wb") as file:
            return subprocess.Popen(
                (machine or self.laptop).command(*CLI, *args),
                env=self.environ(**more),
                cwd=self.folder,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def output(self) -> str:
        """Return what the ddpctl that was started last has written so far."""
        return (self.folder / "output.txt").read_text()

    def until(
        self, process: subprocess.Popen[bytes], condition: Callable[[], object], event: str, timeout_s: float = 120
    ) -> None:
        """Wait for an event of the ddpctl that was started last; fail at once if it ends before."""

        def is_there() -> bool:
            ended = process.poll() is not None  # looked up first: what it writes at its end counts
            holds = bool(condition())
            assert holds or not ended, f"ddpctl exited with {process.returncode} before {event}: {self.output()}"
            return holds

        wait_until(is_there, event, timeout_s)

    def log(self, run: str, node: int = 0) -> str:
        path = self.boxes[node].home / ".ddpctl/runs" / run / f"node-{node}/node.log"
        return path.read_text() if path.exists() else ""

    def alive(self, run: str) -> dict[int, str]:
        """Every process of a run, on whichever machine: they share this one's /proc."""
        lines = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
                environ = (process / "environ").read_bytes().split(b"\0")
                ours = str(self.folder).encode()
                if f"DDP_RUN_ID={run}".encode() in environ and state != "Z" and any(ours in word for word in environ):
                    lines[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return lines


# Each device node is a GPU; nvidia-smi is asked for these, and for the programs that compute on them: none.
SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) exit 0 ;;
  *utilization*) more=", 37, 2048, 16384" ;;
esac
for node in {devices}/nvidia[0-9]; do echo "GPU-{name}-${{node##*nvidia}}$more"; done
"""


def add_gpus(folder: Path, name: str, number: int) -> str:
    """Device nodes of NVIDIA's major number, and an nvidia-smi that lists them; the PATH with it."""
    (folder / "bin").mkdir(parents=True)
    for minor in range(number):
        os.mknod(folder / f"nvidia{minor}", 0o600 | stat.S_IFCHR, os.makedev(195, minor))
    (folder / "bin/nvidia-smi").write_text(SMI.format(devices=folder, name=name))
    (folder / "bin/nvidia-smi").chmod(0o755)
    return f"{folder}/bin:{os.defpath}:/usr/sbin"


@contextlib.contextmanager
def cluster(folder: Path, *, boxes_wanted: int = 2, gpus: int = 0) -> Iterator[Lab]:
    """The machines, with sshds that let the person in; ``gpus``: of each box, stood in for."""
    person = Person(folder / "me")
    with machines(1 + boxes_wanted, prefix="sshlab") as made, contextlib.ExitStack() as stack:
        laptop, *rest = made
        boxes = []
        for port in rest:
            environ = {"PATH": add_gpus(folder / f"dev-{port.name}", port.name, gpus)} if gpus else {}
            box_of = box(folder / port.name, person, address=port.address, machine=port, environ=environ)
            boxes.append(stack.enter_context(box_of))
        variables = {"HOME": str(person.home), "PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES}
        yield Lab(
            folder=folder,
            laptop=laptop,
            machines=tuple(rest),
            boxes=tuple(boxes),
            person=person,
            variables=variables,
        )
