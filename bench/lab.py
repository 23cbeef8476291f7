"""Machines made of network namespaces, each with an address, a hostname and a hosts file. Needs root on Linux.

The machines are connected by a bridge in a separate namespace, so that the host's firewall rules for bridges do not
apply to them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

GROUPS = Path("/sys/fs/cgroup")
HOSTS = Path("/etc/netns")  # `ip netns exec NAME` puts the files of /etc/netns/NAME into the place of /etc's
# and a new /sys over the old one, without the cgroups.
SHOW_MEMORY_GROUPS = (
    "if grep -q ^memory /proc/cgroups; then mount -t tmpfs cgroup /sys/fs/cgroup && mkdir /sys/fs/cgroup/memory && "
    "mount -t cgroup -o memory cgroup /sys/fs/cgroup/memory; fi 2>/dev/null;"
)


# Waits until this process ends, however it does, and then removes the namespaces that it has left.
REMOVE_AT_END = """\
read -r _
for name; do
  while pids=$(ip netns pids "$name") && [ -n "$pids" ]; do kill -9 $pids; sleep 0.1; done
  ip netns del "$name" && rm -rf "/etc/netns/$name"
done 2>/dev/null
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True, text=True)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One namespace. ``name`` is its hostname, and ``namespace`` its name for `ip netns`."""

    name: str
    namespace: str
    address: str
    switch: str
    port: str  # of the switch, where its cable is
    setup: ClassVar[str] = SHOW_MEMORY_GROUPS  # shell commands that run before each program

    def command(self, *argv: str) -> list[str]:
        """Return the command that runs ``argv`` on this machine."""
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "-u",
            "sh",
            "-c",
            f'hostname "$0"; {self.setup} exec "$@"',
            self.name,
            *argv,
        ]

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start Python with these arguments on this machine. The options are those of Popen."""
        return subprocess.Popen(self.command(sys.executable, *arguments), **options)

    def ip(self, *arguments: str) -> None:
        """Run `ip` on this machine."""
        ip("-n", self.namespace, *arguments)

    def cut(self) -> None:
        """Set the link of this machine down. Packets are lost, but no connection is closed."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        """Set the link of this machine up again."""
        ip("-n", self.switch, "link", "set", self.port, "up")

    def pids(self) -> tuple[int, ...]:
        """Return the pids of the processes on this machine."""
        return pids(self.namespace)

    def kill(self) -> None:
        """Send SIGKILL to all processes on this machine until none is left."""
        while alive := self.pids():
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)

    def write_hosts(self, lines: str) -> None:
        """Write the hosts file of this machine."""
        (HOSTS / self.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")


@contextlib.contextmanager
def machines(number: int, *, prefix: str = "lab") -> Iterator[tuple[Machine, ...]]:
    """Yield machines named node-0, node-1, ... with the addresses 10.77.0.10, .11, ... Remove them at the end."""
    stem = f"{prefix}{os.getpid()}"
    switch = f"{stem}-switch"
    made = tuple(
        Machine(name=f"node-{i}", namespace=f"{stem}-{i}", address=f"10.77.0.{10 + i}", switch=switch, port=f"p{i}")
        for i in range(number)
    )
    names = (*(machine.namespace for machine in made), switch)
    at_end = subprocess.Popen(["sh", "-c", REMOVE_AT_END, "sh", *names], stdin=subprocess.PIPE, start_new_session=True)
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for i, machine in enumerate(made):
            ip("netns", "add", machine.namespace)
            ip("-n", switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
            ip("-n", switch, "link", "set", f"p{i}", "master", "br0", "up")
            machine.ip("addr", "add", f"{machine.address}/24", "dev", "eth0")
            machine.ip("link", "set", "eth0", "up")
            machine.ip("link", "set", "lo", "up")
            (HOSTS / machine.namespace).mkdir(parents=True, exist_ok=True)
            machine.write_hosts("".join(f"{other.address} {other.name}\n" for other in made))
        yield made
    finally:
        for namespace in names:
            _remove(namespace)
        at_end.communicate(timeout=60)


def pids(namespace: str) -> tuple[int, ...]:
    """Return the pids of the processes in a namespace. If it does not exist, return an empty tuple."""
    command = ["ip", "netns", "pids", namespace]
    done = subprocess.run(command, check=False, timeout=10, capture_output=True, text=True)
    return tuple(map(int, done.stdout.split()))


def _remove(namespace: str) -> None:
    for pid in pids(namespace):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=10, capture_output=True)
    shutil.rmtree(HOSTS / namespace, ignore_errors=True)


@contextlib.contextmanager
def cgroup(controller: str, limits: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Make a cgroup (v1) with these limits. Yield a function that moves the calling process into it. Raises OSError."""
    group = GROUPS / controller / f"bench-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        for name, value in limits.items():
            (group / name).write_text(value)
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        deadline = time.monotonic() + 20
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)
