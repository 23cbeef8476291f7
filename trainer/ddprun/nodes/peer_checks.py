"""Comparisons with node 0 when the nodes meet: builds, arguments and clocks.

Keys of the control store: ``facts`` contains node 0's facts. ``arguments`` contains the hashes of its script arguments.
``checked`` counts the nodes that have finished a run with --check-only. ddpwire.clock defines the keys for the clocks.
"""

import contextlib
import json
import time
from functools import partial

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # public, but not in __all__

from ddprun.metrics.metrics import NodeSeries
from ddprun.nodes.preflight import StartedNode, node_label
from ddprun.settings import node_facts
from ddprun.settings.node_config import check_program
from ddprun.system import stores
from ddprun.system.errors import node_error
from ddpwire import clock, metrics
from ddpwire.exits import Exit

LEAVE_TIMEOUT_S = 5.0  # the nodes end at about the same time; a lost one must not hold up node 0
POLL_S = 0.05  # while the other nodes end


class PeerChecks:
    """The checks that a node makes when it meets the others for the first time."""

    def __init__(self, node: StartedNode, series: NodeSeries) -> None:
        self._config, self._report, self._series = node.config, node.report, series
        self._facts = node_facts.read_facts(node.config, node.environ)
        self._has_compared = self._has_reported = False

    def compare(self, control: Store) -> None:
        """Compare this node with node 0. Raises NodeError, or StoreError if the store is lost."""
        if self._has_compared:
            return
        self._has_compared = True
        self._report.begin("compare")
        if self._config.node_rank == 0:
            control.set("facts", json.dumps(self._facts))
            control.set("arguments", json.dumps(node_facts.argument_hashes(self._config.command)))
            clock.answer_requests(control.clone())
            self._report.done(node_facts.summarize_builds(self._facts))
        else:
            node, values = self._config.node_rank, control.multi_get(["facts", "arguments"])
            facts, hashes = stores.decode("facts", values[0], dict), stores.decode("arguments", values[1], list)
            if differences := node_facts.differences(self._facts, facts, node):
                message = f"the nodes do not match: {differences}; make all nodes the same"
                raise node_error(Exit.CONFIG, "config", message, node=node)
            warnings = (
                node_facts.differing_argument(self._config.command, hashes, node),
                node_facts.driver_difference(self._facts, facts, node),
            )
            for warning in filter(None, warnings):
                self._report.warn(warning)
            self._report.done(node_facts.summarize_builds(self._facts), "warning" if any(warnings) else "ok")
            self._report.begin("clock")
            try:
                self._set_clock_offset(clock.offset_s(control, read=partial(stores.decode, make=float)))
            except DistStoreError:
                self._report.done("unknown: node 0 did not answer in time", "warning")
        check_program(self._config)
        self._report.begin("meet")

    def compare_again(self) -> None:
        """Let the next call of ``compare`` repeat the checks, because there is a new node 0."""
        self._has_compared = False

    def report_members(self, members: tuple[int, ...]) -> None:
        """Log that all members have arrived, and record how long each step of the preflight took."""
        if self._has_reported:
            return
        self._has_reported = True
        self._report.done(f"{len(members)} of {self._config.max_nodes} nodes")
        for step in self._report.steps:
            self._series.set(metrics.PREFLIGHT_DURATION, step.seconds, step=step.name)
        self._report.sum_up()

    def leave(self, control: Store) -> None:
        """End a run with --check-only. Node 0 waits for the other nodes, because it serves their store."""
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        with contextlib.suppress(stores.StoreError):  # node 0 has ended: nothing is left to do
            num_done = control.add("checked", 1)
            while self._config.node_rank == 0 and num_done < self._config.max_nodes and time.monotonic() < deadline:
                time.sleep(POLL_S)
                num_done = control.add("checked", 0)

    def _set_clock_offset(self, offset_s: float) -> None:
        self._series.set(metrics.CLOCK_OFFSET, offset_s)
        ahead = "ahead of" if offset_s > 0 else "behind"
        difference = f"{abs(offset_s):.3f} s {ahead} node 0's"
        if abs(offset_s) <= clock.MAX_OFFSET_S:
            self._report.done(difference)
            return
        own = f"the clock of {node_label(self._config.node_rank)}"
        difference = f"{own} is {difference}: times in logs and metrics will be wrong (is NTP running?)"
        self._report.warn(difference)
        self._report.done(difference, "warning")
