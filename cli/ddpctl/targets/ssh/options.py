"""The options of a target of kind ssh: its hosts, and how the ranks run on them."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from ddpctl.command import Host
from ddpctl.files import environments
from ddpctl.job.spec import RUNTIME_ARGS, JobSpec, check_size
from ddpctl.job.values import Options, Rule, Words, between, matching
from ddpwire.machine import MAX_PORT

USER = re.compile(r"[\w.][\w.-]*")
_PATH = r"(~/|/)[^\0\n:,]*"
PATH = matching(_PATH, "expected a path that begins with / or ~/, without ':' or ','")
PROJECT = matching(f"none|sync|{_PATH}", "expected none, sync, or a path that begins with / or ~/, without ':' or ','")
# ssh must not mistake an address for an option.
ADDRESS = matching(r"(?!-)[\w.:-]+", "expected a name of ~/.ssh/config, a host name or an IP address")
NETWORK = matching(r"[A-Za-z0-9][\w.-]*", "host, or a network's name")


@dataclass(frozen=True, kw_only=True)
class SshHost(Options):
    """A machine of the target."""

    address: Annotated[str, ADDRESS]
    """As for ssh: a name in ~/.ssh/config, a host name or an IP address."""
    user: Annotated[str, matching(USER.pattern, "a log-in name")] | None = None
    """The user to log in as. null: as in ~/.ssh/config, else your user name."""
    port: Annotated[int, between(1, MAX_PORT)] | None = None
    """The port of its sshd. null: as in ~/.ssh/config, else 22."""
    key: str | None = None
    """Path of the private key on this machine. null: the keys of the agent and of ~/.ssh."""
    peer: Annotated[str, ADDRESS] | None = None
    """The address at which the other hosts reach it. null: the address that this machine uses."""
    gpus: Annotated[int, between(0, 64)] | None = None
    """Number of its GPUs that a run may use. null: all."""

    @classmethod
    def from_text(cls, text: str) -> "SshHost":
        """Parse a host such as ``alice@box1:2222``. Raises ValueError."""
        host = Host.from_text(text)
        return cls(address=host.address, user=host.user, port=host.port)

    @property
    def host(self) -> Host:
        """The address and login of this machine, for ``Command.host``."""
        return Host(address=self.address, user=self.user, port=self.port, key=self.key)


def check_hosts(hosts: tuple[SshHost, ...]) -> tuple[SshHost, ...]:
    """Check that there is at least one host and that none is listed twice. Raises ValueError."""
    if not hosts:
        raise ValueError("expected at least one host")
    places = [(host.address, host.port) for host in hosts]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(f"{place[0]!r} is listed twice, but a host runs only one node")
    return hosts


@dataclass(frozen=True, kw_only=True)
class SshOptions(Options):
    """The options of a target of kind ssh."""

    hosts: Annotated[tuple[SshHost, ...], Rule(check_hosts)]
    """The hosts in the order of their use, each as USER@HOST:PORT or with the keys address, user, port, key, peer and
    gpus."""
    runtime: Literal["docker", "podman", "none"] = "docker"
    """How nodes run: docker or podman with the job's image, or none: the host's Python."""
    runtime_args: Annotated[Words, RUNTIME_ARGS] = ()
    """More options for the container runtime, each as --NAME=VALUE."""
    python: str = "python3"
    """For runtime none: the Python on every host that has ddpctl[train], as a path or a name on PATH."""
    environment: Annotated[str, Rule(os.path.abspath)] | None = None
    """For runtime none: a uv.lock, pylock.toml or requirements.txt, from which each host gets a Python environment."""
    wheelhouse: Annotated[str, Rule(os.path.abspath)] | None = None
    """A folder here with all wheels of the environment, for hosts without a network."""
    project: Annotated[str, PROJECT] = "none"
    """The ranks' code. none: what is in the image (with runtime none: the home folder); sync: this folder is copied to
    every host; PATH: a folder that every host has."""
    home: Annotated[str, PATH] = "~/.ddpctl"
    """The folder on the hosts that contains the runs."""
    checkpoint_dir: Annotated[str, PATH] | None = None
    """A folder shared by all hosts, for the checkpoints of all runs. null: the run's folder on the host of node 0."""
    network: Annotated[str, NETWORK] = "host"
    """The containers' network: host, or one that can reach the other hosts."""
    exclude: Words = ()
    """Addresses of hosts not to use, such as machines in repair."""
    min_disk: Annotated[str, Rule(check_size)] = "1Gi"
    """Free disk space that every host must have for runs."""

    def problems(self, job: JobSpec) -> Iterable[tuple[str, str]]:
        """Yield the key of each setting that is impossible on this target, with an error message."""
        yield from environments.problems(self, python="python3")
        addresses = [host.address for host in self.hosts]
        for address in self.exclude:
            if address not in addresses:
                yield "target.exclude", f"{address} is not a host of the target; known: {', '.join(addresses)}"
        if job.checkpoint_copies > 1 and self.checkpoint_dir:
            useless = f"{job.checkpoint_copies} copies are useless"
            yield "job.checkpoint_copies", f"{useless}, because all hosts share the target's checkpoint_dir"
        has = sum(address not in self.exclude for address in addresses)
        if job.min_nodes + job.spares > has:
            hosts = f"{has} host{'s' if has != 1 else ''}{' that are not excluded' if self.exclude else ''}"
            spares = f" and {job.spares} spare{'s' * (job.spares > 1)}" if job.spares else ""
            todo = f"use fewer {'spares or ' if job.spares else ''}nodes, or add hosts"
            yield "job.nodes", f"{job.nodes}{spares}, but the target has {hosts}: {todo}"
