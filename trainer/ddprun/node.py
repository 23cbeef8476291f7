"""What the agent of a node works with, put together by bringup."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddprun import memory
from ddprun.contract import Contract
from ddprun.environment import Surroundings
from ddprun.exporter import NodeSeries
from ddprun.journal import Journal
from ddprun.logs import RankLogs
from ddprun.losses import Losses
from ddprun.pulse import Pulse
from ddprun.ranks import Ranks
from ddprun.stop import Stop


@dataclass(frozen=True, kw_only=True)
class Node:
    """What the agent works with."""

    contract: Contract
    node_dir: Path
    environ: Mapping[str, str]  # as ddprun was given it
    around: Surroundings
    ranks: Ranks
    stop: Stop
    logs: RankLogs
    journal: Journal
    series: NodeSeries
    pulse: Pulse
    memory: memory.Memory
    losses: Losses
    step_before: int | None  # the highest of an earlier start of the run
