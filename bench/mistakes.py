"""Mistakes in the setup of a job on two machines, with the commands and scripts of each node."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import lab

PORT = "61234"
JOIN_TIMEOUT_S = 2
LONGER_S = 10  # longer than ddprun takes to notice two running nodes with the same node rank
MEETING_S = 60  # for nodes that all join, so that a slow machine does not look like the mistake
SKEWED = "import time; time.time = lambda real=time.time: real() + 60"
OLDER = "import torch; torch.__version__ = '2.10.0'"
SCRIPT = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"

Machines = tuple[lab.Machine, ...]


@dataclass(frozen=True, kw_only=True)
class Node:
    """How a user starts a node."""

    machine: int
    rank: int
    nnodes: int = 2
    image: str = ""
    startup: str = ""  # Python code that runs first, such as one that changes the clock or torch's version
    script: str = SCRIPT
    arguments: tuple[str, ...] = ()  # the script's


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake. The nodes are started in the order of ``nodes``. The message of node ``speaker`` is recorded."""

    title: str
    nodes: tuple[Node, ...]
    speaker: int
    master: str = "node-0"
    join_timeout_s: float = JOIN_TIMEOUT_S
    prepare: Callable[[Machines], list[list[str]]] = lambda _: []  # changes the machines; commands that run meanwhile


BOTH = (Node(machine=0, rank=0), Node(machine=1, rank=1))
SECOND = BOTH[1:]


def debian(machines: Machines) -> list[list[str]]:
    machines[0].write_hosts("127.0.1.1 node-0\n10.77.0.11 node-1\n")
    return []


def debian_everywhere(machines: Machines) -> list[list[str]]:
    for machine in machines:
        machine.write_hosts(f"127.0.1.1 {machine.name}\n")
    return []


def somebody_listens(machines: Machines) -> list[list[str]]:
    return [machines[0].command(sys.executable, "-m", "http.server", PORT)]


def drop_answers(machines: Machines) -> list[list[str]]:
    machines[0].ip("route", "add", "blackhole", f"{machines[1].address}/32")
    return []


CASES = (
    Case(title="the master's name does not exist", nodes=BOTH, speaker=1, master="nosuch.invalid"),
    Case(title="Debian's `127.0.1.1 node-0` in node 0's /etc/hosts", nodes=BOTH, speaker=0, prepare=debian),
    Case(
        title="Debian's line on every node, but the master is given by its IP address",
        nodes=BOTH,
        speaker=0,
        master="10.77.0.10",
        prepare=debian_everywhere,
    ),
    Case(title="the master's address is not node 0's", nodes=BOTH, speaker=0, master="10.77.0.99"),
    Case(title="the master is 127.0.0.1 on two machines", nodes=BOTH, speaker=1, master="127.0.0.1"),
    Case(title="the port is taken on node 0", nodes=BOTH, speaker=0, prepare=somebody_listens),
    Case(title="node 0 was not started", nodes=SECOND, speaker=0),
    Case(title="node 1 was not started", nodes=BOTH[:1], speaker=0),
    Case(title="a firewall drops what goes to node 0", nodes=BOTH, speaker=1, prepare=drop_answers),
    Case(title="node 0's machine is down", nodes=SECOND, speaker=0, master="10.77.0.99"),
    Case(title="no route leads to node 0's network", nodes=SECOND, speaker=0, master="10.99.0.1"),
    Case(title="something else listens on node 0's port", nodes=SECOND, speaker=0, prepare=somebody_listens),
    Case(
        title="two machines with the same node rank",
        nodes=(Node(machine=0, rank=0, nnodes=3), *2 * (Node(machine=1, rank=1, nnodes=3),)),
        speaker=2,
        join_timeout_s=LONGER_S,
    ),
    Case(
        title="the nodes get different values of --nnodes",
        nodes=(Node(machine=0, rank=0, nnodes=2), Node(machine=1, rank=1, nnodes=3)),
        speaker=1,
        join_timeout_s=MEETING_S,
    ),
    Case(
        title="another torch version (simulated)",
        nodes=(BOTH[0], Node(machine=1, rank=1, startup=OLDER)),
        speaker=0,
        join_timeout_s=MEETING_S,
    ),
    Case(
        title="another image",
        nodes=(Node(machine=0, rank=0, image="train:2@sha256:a1"), Node(machine=1, rank=1, image="train:1@sha256:b2")),
        speaker=0,
        join_timeout_s=MEETING_S,
    ),
    Case(
        title="another script",
        nodes=(BOTH[0], Node(machine=1, rank=1, script=f"{SCRIPT}  # edited")),
        speaker=0,
        join_timeout_s=MEETING_S,
    ),
    Case(
        title="the script gets different arguments on each node",
        nodes=tuple(Node(machine=rank, rank=rank, arguments=("--lr", f"0.{rank}")) for rank in (0, 1)),
        speaker=1,
        join_timeout_s=MEETING_S,
    ),
    Case(
        title="a clock 60 s ahead",
        nodes=(BOTH[0], Node(machine=1, rank=1, startup=SKEWED)),
        speaker=1,
        join_timeout_s=MEETING_S,
    ),
)
