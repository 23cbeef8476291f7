"""The node's folder: made, locked, and cleared of what an earlier ddprun said there."""

import contextlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ddprun import lock
from ddprun.before import Before, look_back
from ddprun.contract import Contract
from ddprun.errors import bad_contract, refused
from ddpwire.exits import Exit
from ddpwire.folder import node_name
from ddpwire.node import NodeState
from ddpwire.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class NodeDir:
    """A folder that is this node's for as long as ``lock_fd`` is open."""

    path: Path
    lock_fd: int
    is_temporary: bool  # nobody asked for a run's folder: it goes with a success
    before: Before | None  # an earlier start of the same run


def leave_word(outcome: Outcome, run_dir: str | None, node_rank: str | None) -> None:
    """Write the outcome of a node that was refused, where its launcher will look for it, if that can be told."""
    if run_dir and node_rank and re.fullmatch(r"[0-9]{1,4}", node_rank):
        path = Path(run_dir) / node_name(int(node_rank))
        with contextlib.suppress(OSError):
            path.mkdir(exist_ok=True)
            if not lock.is_held(path):  # else it is another's
                outcome.write(path)


def claim(contract: Contract, state: NodeState) -> NodeDir:
    """Make and lock the folder, and say in it who has it. An earlier start's rank logs stay. Raises NodeError."""
    try:
        run_dir = contract.run_dir or Path(tempfile.mkdtemp(prefix="ddprun-"))
        path = run_dir / node_name(contract.node_rank)
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = lock.take(path)
        if lock_fd is None:
            raise bad_contract(
                f"{path} belongs to another ddprun that is still alive: "
                f"give each node its own --node-rank, or this run its own --run-dir"
            )
        before = look_back(path, contract.run_id)
        state.write(path)
    except OSError as error:
        message = f"the node's folder cannot be made: {error.filename}: {error.strerror}"
        raise refused(Exit.CANNOT_WRITE, "unavailable", message) from None
    return NodeDir(path=path, lock_fd=lock_fd, is_temporary=contract.run_dir is None, before=before)
