"""Where the ranks are, for who names one to a person: a rank's number says nothing of the machine to look at."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from ddptrain.place import Place
from ddptrain.straggler import Naming
from ddpwire import names


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """Of a rank."""

    node: int | None  # as the launcher counts; None: it does not say
    host: str

    def __str__(self) -> str:
        return self.host if self.node is None else f"node {self.node} ({self.host})"


def whereabouts(place: Place, environ: Mapping[str, str]) -> tuple[Whereabouts, ...]:
    """Of all ranks. To be called by every rank."""
    node = environ.get(names.RANKS_NODE) or environ.get(names.GROUP_RANK) or ""
    mine = (int(node) if node.isdecimal() else None, socket.gethostname())
    told = [mine] * place.size
    if place.size > 1:
        dist.all_gather_object(told, mine)
    return tuple(Whereabouts(node=number, host=host) for number, host in told)


def named(naming: Naming, where: Whereabouts, step: int) -> str:
    """One line about a slow rank."""
    who = f"step {step}: rank {naming.rank} on {where}"
    if not naming.ratio:
        return f"{who} is as fast as the others again"
    return f"{who} is slow: a step takes it {naming.ratio:.1f} times as long as the others"
