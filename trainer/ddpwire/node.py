"""``node.json``: who a node's ddprun is and how far it has come; rewritten whole on every change of its state."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ddpwire.folder import NODE, write_atomic

State = Literal["starting", "rendezvous", "training", "stopping", "succeeded", "failed"]


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank of the present attempt on this node."""

    rank: int  # global
    local_rank: int
    pid: int
    log: str  # the log's path, as the node sees it


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What a node says about itself. It is current only while the node's ddprun.lock is held."""

    run: str
    node: int
    pid: int  # of ddprun
    state: State
    started: float  # when ddprun started, in seconds since the epoch
    attempt: int = 1
    metrics: str | None = None  # the URL to scrape; None: not up yet
    master: str | None = None  # host:port of the node's rendezvous; None: not known yet
    ranks: tuple[RankProcess, ...] = ()

    def write(self, node_dir: Path) -> None:
        """Write it into a node's folder. Raises OSError."""
        write_atomic(node_dir / NODE, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_node(text: str) -> NodeState:
    """The state that ``text``, the content of a node.json, tells. Raises ValueError.

    Keys that this version does not know are passed over: another version may have written it.
    """
    try:
        fields = json.loads(text)
        known = {key: fields[key] for key in NodeState.__dataclass_fields__ if key in fields}
        ranks = tuple(
            RankProcess(**{key: rank[key] for key in RankProcess.__dataclass_fields__ if key in rank})
            for rank in known.pop("ranks", ())
        )
        return NodeState(ranks=ranks, **known)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not a node's state: {error}") from None
