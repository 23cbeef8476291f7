"""Measure how long ddpctl's commands take on many SSH hosts, compared with Fabric's group call and `xargs -P ssh`.

Each host is an sshd on one of 127.0.1.1, .2, ..., with a key in known_hosts. A script replaces ddprun there: it holds
the node's lock, writes node.json and a line of output, and ends on a signal. For the row `connect and run`, ddpctl runs
`true` on all hosts, with the code that all of its commands use. Fabric's group call (which checks no host key) and
OpenSSH's client run `true`, too. In another row, ~/.ssh/config has a Host block for each host, so ddpctl calls `ssh -G`
for each host.

Every measurement starts a new process with new connections. A turn runs all measurements. Every second turn reverses
the order of the rows that run `true`. Each turn gives a ratio: a time, divided by Fabric's time in the same turn. The
table shows the median of these ratios. The CPU time includes only the processes of the client, not those of the hosts.

    python bench/ssh.py --hosts 64 --turns 5
"""

import argparse
import getpass
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import measuring

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cli"), str(ROOT / "trainer")]

from tests.cluster.ssh_lab import MISSING, Person, box  # noqa: E402

from ddpwire import names  # noqa: E402
from ddpwire.run_files import LOCK, NODE, OUTCOME, NodeState, Outcome  # noqa: E402

GOAL = 1.1  # times Fabric, to connect and run
GROUP = """
import sys
from fabric import ThreadingGroup
key, port, *hosts = sys.argv[1:]
done = ThreadingGroup(*hosts, port=int(port), connect_kwargs={"key_filename": key}).run("true", hide=True)
assert len(done) == len(hosts)
"""
OURS = """
import os, sys
from ddpctl.command import Command, Host
from ddpctl.execution.executor import Executor
_, port, *hosts = sys.argv[1:]
def verb():
    return (yield tuple(Command(argv=("true",), host=Host(address=host, port=int(port))) for host in hosts))
assert not any(output.returncode for output in Executor(os.environ).perform(verb()))
"""
CONNECT, BLOCKS, FABRIC, XARGS = "connect and run", "  a Host block each", "fabric group", "xargs ssh"
VERBS: Mapping[str, tuple[str, ...]] = {
    "preflight": ("launch", "--name", "night", "--dry-run", "--", "train.py"),
    "start": ("launch", "--name", "night", "--detach", "--", "train.py"),
    "status": ("status", "night"),
    "logs": ("logs", "night"),
    "stop": ("stop", "night"),
}
ROWS = (FABRIC, XARGS, CONNECT, BLOCKS)
PYTHON = f"""#!/bin/sh
case "$*" in
  -V) echo "Python 3.11.7" ;;
  *nodectl\\ port*) echo '{{"port": 29500}}' ;;
  *nodectl\\ signal*) kill "$(cat "$HOME/pid")" 2>/dev/null; echo '{{"alive": false}}' ;;
  *-m\\ ddprun*)
    cd "${names.RUN_DIR}/node-${names.NODE_RANK}"
    exec 7>{LOCK}
    flock 7
    cp "$HOME/{NODE}" {NODE}
    echo "[node${names.NODE_RANK} rank0] step 1"
    echo $$ >"$HOME/pid"
    trap 'cp "$HOME/{OUTCOME}" .; exit' TERM
    sleep 600 7>&- 9>&- & sleep=$!
    wait
    kill $sleep ;;
esac
"""
Times = dict[str, list[tuple[float, float]]]  # by what was measured: seconds of wall and CPU time of every turn


@dataclass(frozen=True, kw_only=True)
class Lab:
    """The hosts, and the user who may log in there."""

    folder: Path
    person: Person
    port: int
    places: Sequence[str]

    def time(self, argv: Sequence[str]) -> tuple[float, float, str]:
        """Return the wall time and the CPU time of a program in seconds, and its output."""
        env = {"HOME": str(self.person.home), "PATH": os.defpath, "USER": getpass.getuser(),
               "DDPCTL_STATE_DIR": f"{self.folder}/runs",
               "PYTHONPATH": os.pathsep.join([str(ROOT / "cli"), str(ROOT / "trainer")])}  # fmt: skip
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(argv, env=env, cwd=self.folder, capture_output=True, text=True, timeout=240)
        took, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout

    def connect(self, row: str) -> tuple[float, float]:
        """Run the command `true` on all hosts. Return the wall time and the CPU time."""
        key = str(self.person.home / ".ssh" / "id_ed25519")
        blocks = (
            "".join(f"Host {place}\n  User {getpass.getuser()}\n" for place in self.places) if row == BLOCKS else ""
        )
        (self.person.home / ".ssh/config").write_text(blocks)
        ssh = (
            f"printf '%s\\n' {' '.join(self.places)} | xargs -P{len(self.places)} -I{{}} ssh -F none -p {self.port} "
            f"-i {key} -o UserKnownHostsFile={self.person.known_hosts} -o BatchMode=yes {{}} true"
        )
        program = (sys.executable, "-P", "-c", GROUP if row == FABRIC else OURS, key, str(self.port), *self.places)
        return self.time(("/bin/sh", "-c", ssh) if row == XARGS else program)[:2]

    def verbs(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield the time of each command. Each command gets a new run."""
        (self.person.home / ".ssh/config").unlink(missing_ok=True)
        for verb, arguments in VERBS.items():
            *took, output = self.time((sys.executable, "-P", "-m", "ddpctl", *arguments))
            if verb == "start":
                self.wait_for_nodes()
            if verb == "status":
                assert f"{len(self.places)} of {len(self.places)} nodes alive" in output, output
            if verb == "logs":
                assert output.count("step 1\n") == len(self.places), output
            yield verb, (took[0], took[1])
        self.time((sys.executable, "-P", "-m", "ddpctl", "rm", "night"))

    def wait_for_nodes(self) -> None:
        """Wait until every node has written its first files."""
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("box*/home/pid"))) < len(self.places):
            assert time.monotonic() < deadline, "a node did not start"
            time.sleep(0.05)


@contextmanager
def hosts(folder: Path, number: int) -> Iterator[Lab]:
    """Start ``number`` hosts, and write a configuration that lists them."""
    person, port = Person(folder / "me"), measuring.free_port()
    places = [f"127.0.{1 + node // 250}.{1 + node % 250}" for node in range(number)]
    python = folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    with ExitStack() as stack:
        for node, place in enumerate(places):
            made = stack.enter_context(box(folder / f"box{node}", person, address=place, port=port))
            (made.home / "train.py").touch()
            NodeState(run="night", node=node, pid=1, state="training", started=time.time()).write(made.home)
            Outcome(code=143, cause="stopped", message="stopped").write(made.home)
        listed = ", ".join(f"{place}:{port}" for place in places)
        (folder / "ddpctl.yaml").write_text(
            f"job: {{nodes: {number}, gpus: 1, device: cpu}}\ntarget: boxes\ntargets:\n  boxes:\n    kind: ssh\n"
            f"    runtime: none\n    python: {python}\n    hosts: [{listed}]\n"
        )
        yield Lab(folder=folder, person=person, port=port, places=places)


def measure(number: int, turns: int) -> Times:
    """Measure everything in every turn."""
    times_of: Times = {row: [] for row in (*ROWS, *VERBS)}
    with tempfile.TemporaryDirectory(prefix="bench-ssh-") as name, hosts(Path(name), number) as lab:
        for turn in range(turns):
            for row in ROWS if turn % 2 == 0 else ROWS[::-1]:
                times_of[row].append(lab.connect(row))
            for verb, times in lab.verbs():
                times_of[verb].append(times)
    return times_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if MISSING:
        sys.exit(MISSING)
    times_of = measure(args.hosts, args.turns)
    if args.json:
        print(json.dumps({"hosts": args.hosts, "seconds": times_of}))
        return
    print(f"{args.hosts} hosts, {measuring.machine()}, python {platform.python_version()}, "
          f"fabric {metadata.version('fabric')}, n = {args.turns}: median (worst) seconds, times Fabric's")  # fmt: skip
    for row, times in times_of.items():
        cells = []
        for clock, mine, theirs in zip(("wall", "CPU"), zip(*times, strict=True), zip(*times_of[FABRIC], strict=True),
                                      strict=True):  # fmt: skip
            ratio = measuring.ratio(mine, theirs)
            cells.append(f"{clock} {statistics.median(mine):6.2f} ({max(mine):6.2f}), {ratio:5.2f} x")
            if row == CONNECT:
                cells[-1] += f" (goal {GOAL}: {'reached' if ratio <= GOAL else 'NOT reached'})"
        print(f"  {row:<20} {'; '.join(cells)}")


if __name__ == "__main__":
    main()
