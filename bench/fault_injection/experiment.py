"""Records the effects of a fault while they happen. No code here is specific to one fault."""

import random
import re
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from fault_injection import job as fault_job
from fault_injection.job import NODES, WORLD, Job, TooLateError
from fault_injection.result import Result

BOTH = range(NODES)
GONE_S = 10.0  # how long is waited for the end of what is to end
END_S = 60.0
EXIT_CAUSES = ("sigkill", "sigsegv", "oom", "hang_killed")  # a peer's own end may come before the verdict, or not


class Experiment:
    """A job with a fault. Its records are kept, even if a later wait ends with a time-out."""

    def __init__(self, job: Job, dice: random.Random, weights: str, *, limit_s: float = 0.0) -> None:
        """``weights`` is the sha256 of an undisturbed run's weights.

        ``limit_s``, if not 0, is the time-out of ``is_noticed``, ``trains_again`` and ``ends``.
        """
        self.job = job
        self.dice = dice
        self.result = Result()
        self._weights = weights
        self._limit_s = limit_s
        self._at = 0.0  # time.time() of the fault
        self._pids: dict[int, list[int]] = {}
        self._num_words: dict[int, int] = {}

    def train_until(self, step: int) -> None:
        """Start the job and wait until every rank has finished step ``step``."""
        self.job.start()
        self.job.until(lambda: self.job.reached(step), f"step {step}")

    def now(self, at: float | None = None) -> None:
        """Record that the fault happens now, or happened at the time ``at``."""
        self._at = at or time.time()
        self._pids = {rank: self.job.pids(rank) for rank in WORLD}
        self._num_words = {node: len(self.job.words(node)) for node in BOTH}

    def passed_s(self) -> float:
        return time.time() - self._at

    def is_noticed(self, *nodes: int) -> None:
        """Wait until each of these nodes has printed a line since the fault, or has ended."""

        def have_spoken() -> bool:
            job = self.job
            return all(len(job.words(node)) > self._num_words[node] or job.has_ended(node) for node in nodes)

        self.job.until(have_spoken, f"a word of nodes {nodes}", self._limit_s or END_S)
        self.result = replace(self.result, noticed_s=self.passed_s())

    def trains_again(self) -> None:
        """Wait until every rank has finished a step in a new process."""
        job = self.job
        limit_s = self._limit_s or fault_job.START_S
        job.until(lambda: job.first_steps_of_new(self._pids), "a step of every rank's new process", limit_s)
        firsts = job.first_steps_of_new(self._pids) or []
        started = min(first.at for first in firsts)
        best = max((made.step for rank in WORLD for made in job.steps(rank) if made.at < started), default=0)
        lost = max(0, best - firsts[0].step + 1)
        self.result = replace(self.result, again_s=max(first.at for first in firsts) - self._at, steps_lost=lost)

    def is_gone(self, pids: Callable[[], Collection[int]] | None = None) -> None:
        """Wait until all of these processes have ended. By default, wait for all processes on the machines."""
        began = time.time()
        remaining = pids or self.job.alive
        try:
            self.job.until(lambda: not remaining(), "the end of all processes", GONE_S)
        except TooLateError:
            self.result = replace(self.result, orphans=len(remaining()))
            return
        self.result = replace(self.result, gone_s=max(time.time() - began, self.result.gone_s or 0.0))

    def counters(self) -> dict[str, object]:
        """Return two counters of each node: restarts by reason, and unwanted exits by cause."""
        with ThreadPoolExecutor() as pool:  # at once: the run may be over soon
            pages = list(pool.map(self.job.metrics, BOTH))
        restarts = [counted("ddp_restarts_total", page) for page in pages]
        exits = [counted("ddp_rank_exits_total", page) for page in pages]
        return {"restarts": restarts, "exits": [{k: n[k] for k in EXIT_CAUSES if n.get(k)} for n in exits]}

    def ends(self, nodes: Sequence[int] = BOTH) -> None:
        """Wait until the launchers of these nodes have ended and none of their processes is left."""
        self.job.until(lambda: self.job.has_ended(*nodes), "the end of the run", self._limit_s or END_S)
        self.result = replace(self.result, ended_s=self.passed_s())
        self.is_gone(lambda: [pid for node in nodes for pid in self.job.machines[node].pids()])

    def succeeds(self, *, codes: Sequence[Sequence[int]], restarts: object, exits: object) -> None:
        """Wait for the end, and expect the weights of an undisturbed run.

        ``codes`` has the expected exit codes of each node, one for each time that the node was started.
        """
        if self.job.launcher != "ddprun":
            return
        observed = self.counters()
        self.ends()
        ends = [(outcome.code, outcome.cause) if outcome else None for outcome in map(self.job.outcome, BOTH)]
        expected = {"weights": {str(rank): self._weights for rank in WORLD}, "outcomes": [(0, "ok")] * NODES}
        expected |= {"codes": [list(node) for node in codes], "restarts": restarts, "exits": exits}
        observed |= {"weights": self.job.weights(), "outcomes": ends, "codes": [self.job.codes[node] for node in BOTH]}
        self.result = replace(self.result, expected=expected, found=observed)

    def also(self, name: str, expected: object, observed: object) -> None:
        """Record another value and its expected value."""
        both = self.result.expected | {name: expected}, self.result.found | {name: observed}
        self.result = replace(self.result, expected=both[0], found=both[1])

    def fails(self, message: str | Sequence[str], *, code: int, nodes: Sequence[int] = BOTH, ending: str = "") -> None:
        """Wait for the end. Expect each of these nodes to exit with ``code`` and ``message`` (or one message per node).

        ``ending`` is a regular expression for the end of a message, which differs between machines.
        """
        self.ends(nodes)
        if self.job.launcher != "ddprun":
            return
        messages = [message] * len(nodes) if isinstance(message, str) else list(message)
        outcomes = [self.job.outcome(node) for node in nodes]
        self.result = replace(
            self.result,
            expected={"codes": [[code]] * len(nodes), "messages": messages},
            found={
                "codes": [self.job.codes[node] for node in nodes],
                "messages": [re.sub(f"{ending}$", "", outcome.message) if outcome else None for outcome in outcomes],
            },
        )


def undisturbed(folder: Path) -> str:
    """Return the sha256 of the final weights of a run without a fault."""
    with fault_job.start_job(folder, prefix="calm") as job:
        job.start()
        job.until(job.has_ended, "the end of an undisturbed run", 2 * END_S)
        weights = set(job.weights().values())
        if [job.codes[node] for node in BOTH] != [[0]] * NODES or len(weights) != 1:
            raise TooLateError(f"an undisturbed run failed: {job.codes}; {job.last_words()}")
        return weights.pop()


def counted(name: str, page: str) -> dict[str, int]:
    """Return the value of a counter for each value of its only label. Zeros are left out."""
    samples = re.findall(rf'^{name}{{\w+="(\w+)"}} (\S+)$', page, re.M)
    return {label: int(float(value)) for label, value in samples if float(value)}
