"""What a node tells of itself while it runs: its node.json, its events, and its lines for a person."""

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddprun.logs import Console
from ddpwire.events import EVENTS, EventLog
from ddpwire.node import NodeState
from ddpwire.outcome import Outcome


class Journal:
    """The node's present state, written whenever it changes; ``claim`` has written the first."""

    def __init__(self, node_dir: Path, state: NodeState, console: Console) -> None:
        self._node_dir = node_dir
        self._lock = threading.Lock()
        self._events = EventLog(node_dir / EVENTS, node=state.node)
        self.state = state
        self.say = console.say
        self.tell = self._events.tell

    def tell_failure(self, said: Outcome) -> None:
        """The nodes agree on the failure of an attempt."""
        self.tell("failed", rank=said.rank, node=said.node, step=said.step, cause=said.cause, message=said.message)

    def update(self, **changes: Any) -> None:
        """Write what has changed. A disk that is full later must not stop a training: then the old state stays."""
        with self._lock, contextlib.suppress(OSError):
            self.state = replace(self.state, **changes)
            self._events.attempt = self.state.attempt
            self.state.write(self._node_dir)
