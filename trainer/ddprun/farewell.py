"""What a node says of the end of a run that failed: the sentence is told once, by the node that it is about. Pure.

A person reads the lines of all nodes together, and eight copies of one sentence, seven of them beside the wrong logs,
hide it. Who has only one node's lines (of a pod) is told where to look.
"""

from pathlib import Path

from ddpwire.folder import rank_log
from ddpwire.outcome import Outcome


def farewell(outcome: Outcome, *, node: int, folder: Path, on_one_machine: bool) -> str:
    """The last line of ``node``, whose folder this is; empty: another's says it all."""
    about = _about(outcome)
    if about not in (None, node) and outcome.node != node:
        why = f"rank {outcome.rank} on node {about}" if outcome.rank is not None else f"node {outcome.node}"
        why = why if outcome.node is not None else f"node {about}, which says why"
        return "" if on_one_machine else f"ends with {why} (exit code {outcome.code}; logs of this node in {folder})"
    logs = f"logs in {folder}"
    # After a stop no rank's log is the one to read, whichever of them ended first.
    if outcome.rank is not None and outcome.node == node and outcome.cause != "stopped":
        logs = f"the log of rank {outcome.rank} is {folder / rank_log(outcome.rank)}"
    return f"{outcome.message} (exit code {outcome.code}; {logs})"


def _about(outcome: Outcome) -> int | None:
    """The node that says it; None: each has a sentence of its own, or nobody knows who is left."""
    if outcome.rank is not None:
        return 0 if outcome.node is None else outcome.node
    return 0 if outcome.cause == "node_lost" and outcome.node else None
