"""Machines out of network namespaces, each with an address, a hostname and a hosts file. Needs root on Linux.

They hang on a bridge in a namespace of its own, so that a host's firewall rules for bridges do not reach them.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOSTS = Path("/etc/netns")  # `ip netns exec NAME` puts the files of /etc/netns/NAME into the place of /etc's


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True, text=True)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One namespace; ``name`` is its hostname, ``namespace`` what `ip netns` calls it."""

    name: str
    namespace: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """``argv``, run on this machine."""
        return [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "-u",
            "sh",
            "-c",
            'hostname "$0" && exec "$@"',
            self.name,
            *argv,
        ]

    def ip(self, *arguments: str) -> None:
        """`ip` on this machine."""
        ip("-n", self.namespace, *arguments)

    def write_hosts(self, lines: str) -> None:
        """The hosts file of this machine."""
        (HOSTS / self.namespace / "hosts").write_text(f"127.0.0.1 localhost\n{lines}")


@contextlib.contextmanager
def machines(number: int, *, prefix: str = "lab") -> Iterator[tuple[Machine, ...]]:
    """That many machines named node-0, node-1, ... that reach each other as 10.77.0.10, .11, ...; gone afterwards."""
    stem = f"{prefix}{os.getpid()}"
    switch = f"{stem}-switch"
    made = tuple(Machine(name=f"node-{i}", namespace=f"{stem}-{i}", address=f"10.77.0.{10 + i}") for i in range(number))
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
        for namespace in (*(machine.namespace for machine in made), switch):
            _remove(namespace)


def _remove(namespace: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", namespace], check=False, timeout=10, capture_output=True, text=True)
    for pid in pids.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "del", namespace], check=False, timeout=10, capture_output=True)
    shutil.rmtree(HOSTS / namespace, ignore_errors=True)
