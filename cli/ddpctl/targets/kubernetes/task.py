"""What the follower of pods is told by the target that starts it. Pure."""

from dataclasses import dataclass

POLL_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be followed: JSON on the command line."""

    run: str
    nodes: int  # of the job
    created: float
    workload: str
    master: bool
    context: str | None
    namespace: str | None
    only: str | None  # a regular expression that a line must match
    only_nodes: tuple[int, ...]  # empty: all
    tail: int | None
    poll_s: float = POLL_S
