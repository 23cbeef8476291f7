"""What the catalogue says of a metric."""

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``labels`` maps a label to its values; an empty tuple is a label whose value is free text,
    set once a process (a version, a run's id, a device's number).
    """

    name: str
    kind: Kind
    help: str
    set_by: Literal["ddprun", "ddptrain"]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    needs_gpu: bool = False  # there only where there is one
    by_rank_0: bool = False  # the same for all ranks: rank 0 alone tells it
    at_first: bool = True  # False: there is no sample before something has happened
