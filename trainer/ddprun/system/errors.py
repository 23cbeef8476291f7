"""The errors that end ddprun before its ranks have ended."""

from ddpwire.exits import Exit, worth_a_retry
from ddpwire.run_files import Cause, Outcome


class NodeError(Exception):
    """An error that ends this node with ``outcome``, whose message is one line."""

    def __init__(self, outcome: Outcome, *, leaves: bool = False) -> None:
        """``leaves``: whether only this node ends and a new node replaces it."""
        super().__init__(outcome.message)
        self.outcome, self.leaves = outcome, leaves

    @property
    def code(self) -> int:
        """The exit code of the outcome."""
        return self.outcome.code


def node_error(code: Exit, cause: Cause, message: str, *, hint: str = "", node: int | None = None) -> NodeError:
    """Return an error that ends this node with the exit code ``code``. ``node`` is the node that caused it."""
    line = f"{message}: {hint}" if hint else message
    return NodeError(Outcome(code=code, cause=cause, message=line, node=node, retry=worth_a_retry(code)))


def config_error(message: str, *, hint: str = "") -> NodeError:
    """Return the error for invalid settings, or settings that differ between nodes."""
    return node_error(Exit.CONFIG, "config", message, hint=hint)


def store_lost_error() -> NodeError:
    """Return the error of a node that can no longer reach the store on node 0."""
    return node_error(Exit.KILLED, "node_lost", "node 0 was lost: its store no longer answers", node=0)
