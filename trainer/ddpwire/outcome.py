"""``outcome.json``: how a node's part of a run ended. Every node of a run says the same."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ddpwire.folder import OUTCOME, write_atomic

Cause = Literal[
    "ok",  # every rank exited with 0
    "error",  # a rank exited with a code of its own
    "killed",  # a rank died of a signal that nobody here sent
    "oom",  # a rank was killed for memory
    "hang",  # a rank hung and was killed
    "stopped",  # a stop was asked for, and the ranks ended with the code that says so
    "node_lost",  # a node's ddprun is gone
    "gave_up",  # the ranks failed again and again without progress
    "absent",  # not all nodes came in time
    "unavailable",  # an address or a port could not be had
    "config",  # the nodes' contracts contradict themselves or each other
    "internal",  # a fault of ours
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The first failure of a run, or its success."""

    code: int  # ddpwire.exits; what ddprun exits with on every node
    cause: Cause
    message: str  # one line for a person
    node: int | None = None  # whose failure it was; None: nobody's
    rank: int | None = None  # global rank
    step: int | None = None  # the last step that the rank reported, if it did
    retry: bool = False  # whether starting the same run again may help
    attempt: int = 1

    def write(self, node_dir: Path) -> None:
        """Write it into a node's folder. Raises OSError."""
        write_atomic(node_dir / OUTCOME, (json.dumps(asdict(self), indent=1) + "\n").encode())


def read_outcome(text: str) -> Outcome:
    """The outcome that ``text``, the content of an outcome.json, tells. Raises ValueError.

    Keys that this version does not know are passed over: another version may have written it.
    """
    try:
        fields = json.loads(text)
        return Outcome(**{key: fields[key] for key in Outcome.__dataclass_fields__ if key in fields})
    except (TypeError, AttributeError) as error:
        raise ValueError(f"not an outcome: {error}") from None
