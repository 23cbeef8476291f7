"""The status of runs and nodes as values. The status of a run is derived from the status of its nodes."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ddpwire import metrics
from ddpwire.exits import Exit
from ddpwire.history import TIME, Row, read_history
from ddpwire.machine import enumerate_ranges
from ddpwire.run_files import NodeState, Outcome, read_node, read_outcome

State = Literal[
    "pending",  # in a queue: it has no nodes yet, or has lost them again
    "starting",
    "rendezvous",
    "running",  # its ranks run, but no step is reported: the first has not ended, or the script reports none
    "training",
    "suspended",  # by a user or a queue: it has no nodes, and continues when it is resumed
    "stopping",
    "succeeded",
    "failed",
    "stopped",
    "lost",
    "unknown",
]
ENDED: frozenset[State] = frozenset({"succeeded", "failed", "stopped", "lost"})

# The state of an active run is the first of these states that any of its living nodes has, also in ddpctl top.
ORDER: tuple[State, ...] = ("stopping", "starting", "rendezvous", "training")


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a training according to a node's history. A field is None if its value is unknown."""

    step: int
    planned: int | None = None
    epoch: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    checkpoint_step: int | None = None
    is_current: bool = True  # False: the ranks have not completed a step since their restart

    @property
    def left_s(self) -> float | None:
        """The remaining time in seconds at the current pace, or None if it is unknown."""
        return max(0, self.planned - self.step) / self.steps_per_s if self.planned and self.steps_per_s else None


def read_progress(text: str) -> Progress | None:
    """Parse the header and the last rows of a history.csv. Return None if they contain no step."""
    every = list(read_history(text))
    rows = [row for row in every if metrics.LAST_STEP.name in row]
    if not rows:
        return None
    steps = [row[metrics.LAST_STEP.name] for row in rows]
    restart = max((index for index in range(1, len(rows)) if steps[index] < steps[index - 1]), default=0)
    since = rows[restart:]  # the pace and the loss before a restart say nothing about the present
    first, last = since[0], since[-1]

    def value(metric: metrics.Metric, rows: Sequence[Row] = rows) -> float | None:  # ranks report some values later
        number = next((row[metric.name] for row in reversed(rows) if metric.name in row), None)
        return number if number is not None and math.isfinite(number) else None

    def whole(metric: metrics.Metric) -> int | None:
        return None if (number := value(metric)) is None else int(number)

    done, seconds = steps[-1] - steps[restart], last[TIME] - first[TIME]
    return Progress(
        step=int(last[metrics.LAST_STEP.name]),
        planned=whole(metrics.STEPS_PLANNED),
        epoch=whole(metrics.EPOCH),
        loss=value(metrics.LOSS, since),
        steps_per_s=done / seconds if done > 0 and seconds > 0 else None,
        checkpoint_step=whole(metrics.CHECKPOINT_LAST_STEP),
        is_current=last is every[-1],
    )


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The status of one node."""

    node: int
    alive: bool
    state: NodeState | None  # None: the node has reported nothing
    outcome: Outcome | None  # None: the node has no outcome
    note: str = ""  # a message of the target
    progress: Progress | None = None
    gone: bool = False  # its folder no longer exists
    remains: bool = False  # ddprun was killed, but other processes of the run still exist

    @property
    def number(self) -> int:
        """The number of the node that this machine is. It differs from ``node`` after a spare has taken a place."""
        return self.state.node if self.state and self.state.spare is not None else self.node

    @property
    def is_spare(self) -> bool:
        """Whether this machine waits, or has waited, to take the place of a lost node."""
        return self.state is not None and self.state.state == "spare"


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of one run."""

    run: str
    state: State
    message: str  # one line for the user
    code: int | None = None  # the run's exit code, once it has ended
    outcome: Outcome | None = None
    nodes: tuple[NodeReport, ...] = ()
    tasks: tuple["RunStatus", ...] = ()  # of an array, each with its own name
    remains: bool = False  # the run has ended, but its job, logs or processes still exist
    has_logs: bool = True  # its logs can be read; False: they were lost with its nodes
    has_files: bool = True  # its files (checkpoints) still exist; False: they were lost with its nodes

    @property
    def is_absent(self) -> bool:
        """Whether the run has no nodes and no logs, because it has not started yet or was deleted."""
        return self.state == "starting" and not self.has_logs

    @property
    def ended(self) -> bool:
        """Whether the complete run has ended."""
        return self.state in ENDED

    @property
    def progress(self) -> Progress | None:
        """The progress of the run. Each of step, epoch, loss and checkpoint step is the largest value of all nodes.

        None for an array of tasks, or if no node has progress.
        """
        reported = [node.progress for node in self.nodes if node.progress]
        if self.outcome and self.outcome.step is not None:  # newer than the last row of a history
            reported.append(Progress(step=self.outcome.step))
        if self.tasks or not reported:
            return None
        farthest = max(reported, key=lambda progress: progress.step)
        names = ("planned", "epoch", "loss", "checkpoint_step")  # the largest loss, as in the report
        known = {name: [value for node in reported if (value := getattr(node, name)) is not None] for name in names}
        return replace(farthest, **{name: max(values) for name, values in known.items() if values})

    @property
    def alive(self) -> bool:
        """Whether any of the run's nodes is alive."""
        return any(report.alive for report in self.nodes)


def have_steps(nodes: tuple[NodeReport, ...]) -> bool:
    """Return whether the ranks have reported a step since they started."""
    return any(report.progress and report.progress.is_current for report in nodes)


def _not_ended(nodes: Iterable[NodeState]) -> str:
    """Return the end of a sentence. It names the ranks that were asked to end but have not ended."""
    states = {rank.rank: rank.state for node in nodes for rank in node.ranks if rank.state in ("running", "stopped")}
    halted = [rank for rank, state in states.items() if state == "stopped"]
    which = f"{_ranks(halted)}: " if len(halted) < len(states) else ""
    text = f"; {_ranks(states)} {'have' if len(states) > 1 else 'has'} not ended" if states else ""
    return text + (f" ({which}stopped by SIGSTOP)" if halted else "")


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {enumerate_ranges(ranks)}"


def node_report(node: int, shown: Mapping[str, Any]) -> NodeReport:
    """Parse the output of ``nodectl show``. Unreadable data, such as data from another version, is skipped."""
    state = outcome = None
    with suppress(ValueError):
        state = read_node(json.dumps(shown["node"])) if shown["node"] else None
    with suppress(ValueError):
        outcome = read_outcome(json.dumps(shown["outcome"])) if shown["outcome"] else None
    progress = read_progress(str(shown.get("history") or ""))
    gone, remains = bool(shown.get("gone")), bool(shown.get("remains"))
    return NodeReport(
        node=node, alive=shown["alive"], state=state, outcome=outcome, progress=progress, gone=gone, remains=remains
    )


def present_nodes(nodes: Iterable[NodeReport]) -> tuple[NodeReport, ...]:
    """Return the reports without those of lost machines whose place a spare has taken."""
    moved = (report for report in nodes if report.state and report.number != report.node)
    latest = {
        report.number: report
        for report in sorted(moved, key=lambda report: report.state.attempt if report.state else 0)
    }
    return tuple(report for report in nodes if latest.get(report.number, report) is report)


def places_taken(nodes: Iterable[NodeReport]) -> list[str]:
    """Return a phrase for each spare that has taken the place of a node."""
    return [f"spare {report.node} is node {report.number}" for report in nodes if report.number != report.node]


def machine_of(nodes: Iterable[NodeReport], number: int) -> int:
    """Return the machine that is the node of this number now. If there is none, the number is that of a machine."""
    return next((report.node for report in present_nodes(nodes) if report.number == number), number)


def _describe_spares(nodes: Iterable[NodeReport]) -> str:
    """Return the end of a sentence about spares that wait, and about those that have taken a place."""
    waiting = sum(report.alive and report.is_spare for report in nodes)
    texts = [f"{waiting} spare{'s' * (waiting > 1)} waiting"] * (waiting > 0) + places_taken(nodes)
    return "".join(f", {text}" for text in texts)


def fold_nodes(run: str, nodes: tuple[NodeReport, ...], *, young: bool) -> RunStatus:
    """Return the status of a run.

    ``young`` is true if the run was launched so recently that its nodes may still be starting.
    """
    every, nodes = nodes, present_nodes(nodes)
    outcomes = [report.outcome for report in nodes if report.outcome]
    outcome = min(outcomes, key=lambda outcome: outcome.cause == "node_lost", default=None)
    alive = [report for report in nodes if report.alive and not report.is_spare]
    alive = alive or [report for report in nodes if report.alive]
    gone = [report.node for report in nodes if report.gone]
    status = partial(RunStatus, run=run, nodes=every, remains=not alive and any(report.remains for report in nodes))
    state: State
    if gone and not outcome and not young:
        folders = "the folder of node" if len(gone) == 1 else "the folders of nodes"
        verb = "is" if len(gone) == 1 else "are"
        message = f"{folders} {enumerate_ranges(gone)} {verb} missing, so the outcome is unknown"
        if alive:
            still = f"{len(alive)} {'nodes are' if len(alive) > 1 else 'node is'} still alive"
            return status(state="stopping", message=f"{message}; {still}")
        return status(state="lost", message=message, code=Exit.KILLED)
    if alive:
        states = {report.state.state if report.state else "starting" for report in alive}
        # Node 0 may continue without a node that has lost it.
        continues = any(report.number == 0 for report in alive) and outcome and outcome.cause == "node_lost"
        state = (
            "stopping" if outcome and not continues else next((state for state in ORDER if state in states), "stopping")
        )
        number = sum(not report.is_spare for report in nodes)
        message = f"{len(alive)} of {number} node{'s' * (number != 1)} alive{_describe_spares(nodes)}"
        reported = [report.state for report in alive if report.state]
        attempt = max((node.attempt for node in reported), default=1)
        failure = next((node.last_failure for node in reported if node.attempt == attempt and node.last_failure), "")
        if attempt > 1 and failure and state != "stopping":
            message += f"; attempt {attempt} was started because {failure}"
        elif attempt > 1:
            message += f", attempt {attempt}"
        message += "".join(f"; {node.resumed_apart}" for node in reported if node.resumed_apart)
        message += _not_ended(reported) if state == "stopping" else ""
        if state == "training" and not have_steps(nodes):
            again = " in this attempt" if attempt > 1 else ""
            message += f"; no step reported yet{again} (a script reports its steps with ddp.progress)"
            state = "running"
        return status(state=state, message=message)
    if outcome:
        state = "succeeded" if outcome.code == 0 else "stopped" if outcome.cause == "stopped" else "failed"
        message = outcome.message
        failure = next((node.state.last_failure for node in nodes if node.state and node.state.last_failure), "")
        if outcome.code == 0 and outcome.attempt > 1 and failure:
            message += f"; attempt {outcome.attempt} was started because {failure}"
        return status(state=state, message=message, code=outcome.code, outcome=outcome)
    if young and not any(report.state for report in nodes):
        return status(state="starting", message="no node has started yet")
    message = "on every node, ddprun ended without an outcome: it was killed, or could not start (see node.log)"
    return status(state="lost", message=message, code=Exit.KILLED)
