"""What the preflight has found: lines for a person who waits, a table for one who asks, seconds for a scraper."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed"]
LONG_S = 1.0  # a step that takes longer than this has a line of its own


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is done, one way or the other."""

    name: str  # of ddpwire.catalogue.PREFLIGHT_STEPS
    verdict: Verdict
    what: str
    seconds: float


class Report:
    """The steps of one node, in the order in which they are taken."""

    def __init__(self, say: Callable[[str], None], *, quiet: bool) -> None:
        """``quiet``: where all is on one machine, only what is wrong is worth a line."""
        self._say = say
        self._quiet = quiet
        self._since = time.monotonic()
        self._name = ""
        self.steps: list[Step] = []

    def begin(self, name: str) -> None:
        """The step that is being taken."""
        self._name, self._since = name, time.monotonic()

    def done(self, what: str, verdict: Verdict = "ok") -> None:
        """It has been taken."""
        step = Step(name=self._name, verdict=verdict, what=what, seconds=time.monotonic() - self._since)
        self.steps.append(step)
        self._name = ""
        if step.seconds > LONG_S and verdict == "ok" and not self._quiet:
            self._say(f"{step.name}: {what} (after {step.seconds:.1f} s)")

    def warn(self, line: str) -> None:
        """Something that will not stop the run."""
        self._say(f"warning: {line}")

    def failed(self, why: str) -> None:
        """The step that is being taken has ended it all."""
        if self._name:
            self.done(why, "failed")

    def sum_up(self) -> None:
        """All is well: one line, unless nobody needs it."""
        if not self._quiet:
            what = {step.name: step.what for step in self.steps}
            said = "; ".join(what[name] for name in ("address", "meet", "compare") if name in what)
            self._say(f"preflight: {said} ({sum(step.seconds for step in self.steps):.1f} s)")

    def table(self) -> str:
        """Step, verdict, what; aligned."""
        rows = [("step", "verdict", "what"), *((step.name, step.verdict, step.what) for step in self.steps)]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        return "".join(f"{name:{widths[0]}}  {verdict:{widths[1]}}  {what}\n" for name, verdict, what in rows)
