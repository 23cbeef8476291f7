"""Measure the time to send a project to several SSH hosts with ddpctl, rsync and `tar | ssh`.

Each tool sends the project once, and again after one change. For ddpctl, only the part of a launch that sends the
project is measured. When this part begins, ddpctl is already running and connected to the hosts. Each host is an sshd
on this machine. Every turn runs all tools with new processes. Every second turn reverses the order of the tools. Each
tool sends to all hosts in parallel. Half of the files are text, and half cannot be compressed.

Each turn gives a ratio: a tool's time, divided by the shortest time of rsync and `tar | ssh` in the same turn. The
table shows the median of these ratios.

    python bench/sync.py --hosts 4 --files 2000 --megabytes 100 --turns 5
"""

import argparse
import getpass
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import measuring

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cli"), str(ROOT / "trainer")]

from tests.cluster.ssh_lab import MISSING, Box, Person, box  # noqa: E402

SYNC = """
import os, sys, time
from ddpctl.command import Command, Host
from ddpctl.execution.executor import Executor
from ddpctl.targets.ssh.project import sync
run, cwd, folder, *ports = sys.argv[1:]
hosts = [Host(address="127.0.0.1", port=int(port)) for port in ports]
executor = Executor(os.environ)
def look():
    yield tuple(Command(argv=("true",), host=host) for host in hosts)
executor.perform(look())
started = time.monotonic()
executor.perform(sync(hosts, cwd=cwd, home="~/.ddpctl", run=run, run_dir=folder))
print(time.monotonic() - started)
"""
GOAL = 1.2  # times the best of the other programs
TOOLS = ("ddpctl, rsync on both ends", "ddpctl, no rsync", "rsync -a", "rsync -az", "tar | ssh")


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The project, the hosts, and the user who may log in there."""

    folder: Path
    project: Path
    person: Person
    boxes: Sequence[Box]

    def environ(self, checkout: Path) -> dict[str, str]:
        packages = os.pathsep.join([str(checkout / "cli"), str(checkout / "trainer")])
        return {
            "HOME": str(self.person.home),
            "PATH": "/usr/bin:/bin",
            "USER": getpass.getuser(),
            "PYTHONPATH": packages,
        }

    def ssh(self, host: Box) -> str:
        """Return the command of OpenSSH's client for one host."""
        return (
            f"ssh -F none -p {host.port} -i {self.person.home}/.ssh/id_ed25519 "
            f"-o UserKnownHostsFile={self.person.known_hosts} -o BatchMode=yes"
        )

    def send(self, tool: str, name: str, checkout: Path = ROOT) -> float:
        """Send the project to all hosts with one tool. Return the seconds that this takes. ``checkout``: of ddpctl."""
        environ = self.environ(checkout)
        if tool.startswith("ddpctl"):
            scratch = self.folder / "runs" / name
            scratch.mkdir(parents=True, exist_ok=True)
            if tool.endswith("no rsync"):
                environ["PATH"] = str(self.folder / "bin")
            ports = [str(host.port) for host in self.boxes]
            lines = [shlex.join([sys.executable, "-c", SYNC, name, str(self.project), str(scratch), *ports])]
        elif tool == "tar | ssh":
            lines = [
                f"tar -C {self.project} --exclude=./.git -cf - . | {self.ssh(host)} 127.0.0.1 "
                f"'mkdir -p {host.home}/{name} && tar -C {host.home}/{name} -xf -'"
                for host in self.boxes
            ]
        else:
            lines = [
                f"{tool} --delete --exclude=/.git -e {shlex.quote(self.ssh(host))} {self.project}/ "
                f"127.0.0.1:{host.home}/{name}/"
                for host in self.boxes
            ]
        started = time.monotonic()
        running = [
            subprocess.Popen(
                ["/bin/bash", "-o", "pipefail", "-c", line],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for line in lines
        ]
        for process in running:
            printed, errors = process.communicate(timeout=1200)
            assert process.returncode == 0, errors
        return float(printed) if tool.startswith("ddpctl") else time.monotonic() - started

    def forget(self) -> None:
        """Delete the copies on the hosts."""
        for host in self.boxes:
            shutil.rmtree(host.home)
            host.home.mkdir()


@contextmanager
def lab(folder: Path, num_hosts: int, num_files: int, num_bytes: int) -> Iterator[Lab]:
    """Yield the hosts, and a project in a git repository."""
    person, project = Person(folder / "me"), folder / "project"
    made = random.Random(0)  # noqa: S311 -- the same files each time
    vocabulary = [f"{made.getrandbits(64):x}" for _ in range(5000)]
    size = num_bytes // num_files
    for number in range(num_files):
        path = project / f"package{number % 40}" / f"file{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = " ".join(made.choices(vocabulary, k=size // 16)).encode()
        path.write_bytes(made.randbytes(size) if number % 2 else text.ljust(size))
    subprocess.run(["git", "init", "--quiet", str(project)], check=True, timeout=60)
    tools = folder / "bin"  # without rsync
    tools.mkdir()
    for path in Path("/usr/bin").iterdir():
        if path.name != "rsync":
            (tools / path.name).symlink_to(path)
    with ExitStack() as stack:
        boxes = [
            stack.enter_context(box(folder / f"box{number}", person, address="127.0.0.1", port=measuring.free_port()))
            for number in range(num_hosts)
        ]
        yield Lab(folder=folder, project=project, person=person, boxes=boxes)


def measure(
    num_hosts: int, num_files: int, num_bytes: int, turns: int, tools: Sequence[str]
) -> dict[str, list[list[float]]]:
    """For each tool and turn, return two times in seconds: the first transfer, and the transfer after one change."""
    times_of: dict[str, list[list[float]]] = {tool: [] for tool in tools}
    with (
        tempfile.TemporaryDirectory(prefix="bench-sync-") as name,
        lab(Path(name), num_hosts, num_files, num_bytes) as made,
    ):
        changed = made.project / "package0" / "file0.py"
        for turn, tool in measuring.in_turns(tools, turns):
            first = made.send(tool, f"first-{turn}")
            changed.write_text(f"print({turn})\n")
            name_again = f"again-{turn}" if tool.startswith("ddpctl") else f"first-{turn}"
            times_of[tool].append([first, made.send(tool, name_again)])
            for host in made.boxes:
                (copy,) = host.home.glob(f"**/{name_again}/**/file0.py")
                assert copy.read_text() == f"print({turn})\n"
                assert len(list(copy.parent.parent.glob("*/*.py"))) == num_files
            made.forget()
    return times_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if MISSING:
        sys.exit(MISSING)
    times_of = measure(args.hosts, args.files, args.megabytes * 1000_000, args.turns, TOOLS)
    if args.json:
        print(json.dumps({"hosts": args.hosts, "seconds": times_of}))
        return
    print(f"{args.megabytes} MB in {args.files} files to {args.hosts} hosts, {measuring.machine()}, n = {args.turns}: "
          "median (worst) seconds")  # fmt: skip
    others = [times for tool, times in times_of.items() if not tool.startswith("ddpctl")]
    for tool, turns in times_of.items():
        cells = []
        for step, title in enumerate(("first", "after one change")):
            times = [turn[step] for turn in turns]
            best = [min(turn[step] for turn in side) for side in zip(*others, strict=True)]
            ratio = measuring.ratio(times, best)
            cells.append(f"{title} {statistics.median(times):6.2f} ({max(times):6.2f}), {ratio:.2f} x the best")
            if tool.startswith("ddpctl"):
                cells[-1] += f" (goal {GOAL}: {'reached' if ratio <= GOAL else 'NOT reached'})"
        print(f"  {tool:<28} {'; '.join(cells)}")


if __name__ == "__main__":
    main()
