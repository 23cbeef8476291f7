"""The one way in which ddprun ends other than by its ranks: an outcome that is known before, or without, them."""

from ddpwire.exits import Exit, worth_a_retry
from ddpwire.outcome import Cause, Outcome


class NodeError(Exception):
    """Ends this node with ``outcome``; its message is one line for a person."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def refused(code: Exit, cause: Cause, message: str, *, node: int | None = None) -> NodeError:
    """The error that ends a node with ``code``."""
    return NodeError(Outcome(code=code, cause=cause, message=message, node=node, retry=worth_a_retry(code)))


def bad_contract(message: str) -> NodeError:
    """The error for a contract that contradicts itself or another node's."""
    return refused(Exit.CONFIG, "config", message)


def store_gone() -> NodeError:
    """The error for a node 0 that went, or fell silent, while others needed its store."""
    return refused(Exit.KILLED, "node_lost", "node 0 was lost: its store is gone", node=0)
