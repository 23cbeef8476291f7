"""A run: what is on record of it, and how it fares, as values. Touches nothing."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from ddpctl.spec import JobSpec
from ddpwire.exits import Exit
from ddpwire.node import NodeState, read_node
from ddpwire.outcome import Outcome, read_outcome

State = Literal[
    "pending",  # a queue has it: it has no nodes yet, or none any more
    "starting",
    "rendezvous",
    "training",
    "suspended",  # by a person or a queue: it has no nodes, and goes on when it is resumed
    "stopping",
    "succeeded",
    "failed",
    "stopped",
    "lost",
    "unknown",
]

ENDED: frozenset[State] = frozenset({"succeeded", "failed", "stopped", "lost"})
# A run is as far as its slowest node: the first of these that any living node is in.
_ORDER: tuple[State, ...] = ("stopping", "starting", "rendezvous", "training")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's record: what was asked for, and what its target needs to find it again."""

    name: str
    created: float  # seconds since the epoch
    target: str  # the target's name in the file, or its kind
    kind: str
    options: Mapping[str, Any]
    job: JobSpec
    cwd: str
    folder: str
    checkpoint_dir: str
    version: str  # of the ddpctl that started it
    handle: Mapping[str, Any] = field(default_factory=dict)  # the target's own; "logs": see below

    @property
    def elsewhere(self) -> bool:
        """Whether logs and checkpoints are not in this machine's folders."""
        return "logs" in self.handle

    @property
    def logs_at(self) -> str:
        """Where a person finds the logs: the run's folder, or what the target says."""
        return str(self.handle.get("logs", self.folder))


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What was found out about one node."""

    node: int
    alive: bool
    state: NodeState | None  # None: it has not said a word
    outcome: Outcome | None  # None: it has not ended by itself
    note: str = ""  # what its target has to say of it


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What was found out about one run."""

    run: str
    state: State
    message: str  # one line for a person
    code: int | None = None  # the run's exit code, once it has ended
    outcome: Outcome | None = None
    nodes: tuple[NodeReport, ...] = ()
    remains: bool = False  # it has ended, and something of it is left where it ran: a job, logs

    @property
    def ended(self) -> bool:
        """Whether nothing of the run goes on."""
        return self.state in ENDED

    @property
    def alive(self) -> bool:
        """Whether any of its nodes is."""
        return any(report.alive for report in self.nodes)


def report_of(node: int, shown: Mapping[str, Any]) -> NodeReport:
    """What ``nodectl show`` says. What another version wrote and this one cannot read counts as not written."""
    state = outcome = None
    with suppress(ValueError):
        state = read_node(json.dumps(shown["node"])) if shown["node"] else None
    with suppress(ValueError):
        outcome = read_outcome(json.dumps(shown["outcome"])) if shown["outcome"] else None
    return NodeReport(node=node, alive=shown["alive"], state=state, outcome=outcome)


def fold(run: str, nodes: tuple[NodeReport, ...], *, young: bool) -> RunStatus:
    """One run's status from its nodes'. ``young``: it may not have said its first word yet."""
    outcome = next((report.outcome for report in nodes if report.outcome), None)
    alive = [report for report in nodes if report.alive]
    state: State
    if alive:
        states = {report.state.state if report.state else "starting" for report in alive}
        state = next((state for state in _ORDER if state in states), "stopping")
        if outcome:
            state = "stopping"
        return RunStatus(
            run=run,
            state=state,
            message=f"{len(alive)} of {len(nodes)} node{'s' * (len(nodes) != 1)} alive",
            nodes=nodes,
        )
    if outcome:
        state = "succeeded" if outcome.code == 0 else "stopped" if outcome.cause == "stopped" else "failed"
        return RunStatus(run=run, state=state, message=outcome.message, code=outcome.code, outcome=outcome, nodes=nodes)
    if young and not any(report.state for report in nodes):
        return RunStatus(run=run, state="starting", message="no node has said a word yet", nodes=nodes)
    return RunStatus(
        run=run,
        state="lost",
        message="every node's ddprun ended without a word: it was killed, or could not start (see its node.log)",
        code=Exit.KILLED,
        nodes=nodes,
    )
