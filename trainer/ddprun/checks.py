"""The preflight where the nodes meet: builds and clocks against node 0's, and who is here.

Keys of the control store: ``facts`` is what node 0 has, ``arguments`` what it gives the script, ``checked`` counts the
nodes that have nothing more to ask.
"""

import contextlib
import json
import time
from collections.abc import Mapping

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but torch does not say so

from ddprun import clock, versions
from ddprun.contract import Contract
from ddprun.errors import refused
from ddprun.exporter import NodeSeries
from ddprun.preflight import who
from ddprun.report import Report
from ddpwire import catalogue
from ddpwire.exits import Exit

CLOCKS_APART_S = 2.0
LEAVE_S = 5.0
POLL_S = 0.05


class Checks:
    """What a node does once, when it meets the others for the first time."""

    def __init__(self, contract: Contract, report: Report, series: NodeSeries, environ: Mapping[str, str]) -> None:
        self._contract = contract
        self._report = report
        self._series = series
        self._facts = versions.facts(contract, environ)
        self._has_arrived = self._has_met = False

    def reached(self, where: str) -> None:
        """The control store is there; node 0 has it itself."""
        if self._contract.node_rank:
            self._report.done(f"{where} answers")

    def arrived(self, control: Store) -> None:
        """Compare this node with node 0. Raises NodeError, and RuntimeError when the store is gone."""
        if self._has_arrived:
            return
        self._has_arrived = True
        self._report.begin("compare")
        if self._contract.node_rank == 0:
            control.set("facts", json.dumps(self._facts))
            control.set("arguments", json.dumps(versions.arguments(self._contract.command)))
            clock.answer(control.clone())
            self._report.done(versions.summary(self._facts))
        else:
            self._compare(json.loads(control.get("facts")))
            other = versions.other_argument(
                self._contract.command, json.loads(control.get("arguments")), self._contract.node_rank
            )
            if other:
                self._report.warn(other)
            self._report.done(versions.summary(self._facts), "warning" if other else "ok")
            self._report.begin("clock")
            self._set_clock_offset(clock.offset_s(control))
        self._report.begin("meet")

    def met(self, members: tuple[int, ...]) -> None:
        """All who take part are here."""
        if self._has_met:
            return
        self._has_met = True
        self._report.done(f"{len(members)} of {self._contract.max_nodes} nodes")
        for step in self._report.steps:
            self._series.set(catalogue.PREFLIGHT_DURATION, step.seconds, step=step.name)
        self._report.sum_up()

    def leave(self, control: Store) -> None:
        """End a preflight that no ranks follow: node 0, and with it the store, goes last."""
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(RuntimeError):  # node 0 is gone: there was nothing more to be said
            num_done = control.add("checked", 1)
            while self._contract.node_rank == 0 and num_done < self._contract.max_nodes and time.monotonic() < deadline:
                time.sleep(POLL_S)
                num_done = control.add("checked", 0)

    def _compare(self, firsts: Mapping[str, str]) -> None:
        node = self._contract.node_rank
        if differences := versions.differences(self._facts, firsts, node):
            message = f"the nodes do not match: {differences}; give all the same"
            raise refused(Exit.CONFIG, "config", message, node=node)

    def _set_clock_offset(self, offset_s: float) -> None:
        self._series.set(catalogue.CLOCK_OFFSET, offset_s)
        ahead = "ahead of" if offset_s > 0 else "behind"
        what = f"{abs(offset_s):.3f} s {ahead} node 0's"
        if abs(offset_s) <= CLOCKS_APART_S:
            self._report.done(what)
            return
        what = f"the clock of {who(self._contract.node_rank)} is {what}: times in logs and metrics will mislead (NTP?)"
        self._report.warn(what)
        self._report.done(what, "warning")
