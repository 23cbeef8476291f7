"""How long a status of many SSH hosts takes, against Fabric's bare group call and `xargs -P ssh`.

One sshd answers for 127.0.1.1, .2, ...; each of them is a host with a key in known_hosts and a node that is alive.
Every turn starts a new process and new connections; the three are interleaved.

    python bench/ssh.py --hosts 64 --turns 5
"""

import argparse
import fcntl
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "cli"), str(ROOT / "trainer")]

from tests.cluster.ssh_lab import MISSING, Person, box, free_port, user  # noqa: E402

from ddpctl import run_store  # noqa: E402
from ddpctl.run_store import Run  # noqa: E402
from ddpctl.spec import JobSpec  # noqa: E402
from ddpwire.run_files import (  # noqa: E402
    LOCK,
    NodeState,
    node_name,
)

GROUP = """
import sys
from fabric import ThreadingGroup
key, port, *hosts = sys.argv[1:]
done = ThreadingGroup(*hosts, port=int(port), connect_kwargs={"key_filename": key}).run("true", hide=True)
assert len(done) == len(hosts)
"""


@contextmanager
def hosts(folder: Path, number: int) -> Iterator[tuple[Person, int, list[str]]]:
    """That many hosts on one sshd, each with a node of the run `night` that is alive."""
    person, port = Person(folder / "me"), free_port()
    addresses = [f"127.0.1.{i}" for i in range(1, number + 1)]
    with ExitStack() as stack:
        made = stack.enter_context(box(folder / "box", person, address="0.0.0.0", port=port))  # noqa: S104
        for address in addresses:
            person.trusts(f"[{address}]:{port}", made.host_key)
        for node in range(number):
            there = made.home / ".ddpctl" / "runs" / "night" / node_name(node)
            there.mkdir(parents=True)
            NodeState(run="night", node=node, pid=os.getpid(), state="training", started=time.time()).write(there)
            lock = stack.enter_context((there / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        record = Run(
            name="night",
            created=time.time(),
            target="boxes",
            kind="ssh",
            options={"hosts": [{"address": address, "port": port} for address in addresses], "runtime": "none"},
            job=JobSpec(nodes=str(number)),
            cwd="/",
            folder=str(run_store.create(folder / "runs", "night")),
            checkpoint_dir="",
            version="bench",
            handle={"logs": "ddpctl logs night"},
        )
        run_store.save(record)
        yield person, port, addresses


def seconds(argv: list[str], env: dict[str, str]) -> tuple[float, str]:
    started = time.monotonic()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    took = time.monotonic() - started
    assert done.returncode == 0, done.stderr
    return took, done.stdout


def measure(number: int, turns: int) -> dict[str, list[float]]:
    """Seconds of every turn, by what was measured."""
    found: dict[str, list[float]] = {"ddpctl status": [], "fabric group": [], "xargs ssh": []}
    with tempfile.TemporaryDirectory(prefix="bench-ssh-") as name, hosts(Path(name), number) as (person, port, places):
        env = {"HOME": str(person.home), "PATH": os.defpath, "USER": user(), "DDPCTL_STATE_DIR": f"{name}/runs",
               "PYTHONPATH": os.pathsep.join([str(ROOT / "cli"), str(ROOT / "trainer")])}  # fmt: skip
        key = str(person.home / ".ssh" / "id_ed25519")
        ssh = (
            f"printf '%s\\n' {' '.join(places)} | xargs -P{number} -I{{}} ssh -F none -p {port} -i {key} "
            f"-o UserKnownHostsFile={person.known_hosts} -o BatchMode=yes {{}} true"
        )
        for _ in range(turns):
            took, said = seconds([sys.executable, "-P", "-m", "ddpctl", "status", "night"], env)
            assert f"{number} of {number} nodes alive" in said, said
            found["ddpctl status"].append(took)
            found["fabric group"].append(seconds([sys.executable, "-c", GROUP, key, str(port), *places], env)[0])
            found["xargs ssh"].append(seconds(["/bin/sh", "-c", ssh], env)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if MISSING:
        sys.exit(MISSING)
    found = measure(args.hosts, args.turns)
    medians = {name: statistics.median(times) for name, times in found.items()}
    if args.json:
        print(json.dumps({"hosts": args.hosts, "seconds": found}))
        return
    cores = len(os.sched_getaffinity(0))
    print(f"{args.hosts} hosts, {platform.machine()}, {cores} cores, python {platform.python_version()}, "
          f"fabric {metadata.version('fabric')}, load {os.getloadavg()[0]:.1f}, n = {args.turns}")  # fmt: skip
    for name, times in found.items():
        ratio = medians["ddpctl status"] / medians[name]
        print(f"  {name:<14} median {medians[name]:5.2f} s, worst {max(times):5.2f} s; ddpctl is {ratio:.2f} x")


if __name__ == "__main__":
    main()
