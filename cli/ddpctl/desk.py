"""What every verb works with: the environment's runner, the folder of runs, where to talk; and what is asked."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpctl import runs
from ddpctl.run import Run
from ddpctl.runner import Runner
from ddpctl.spec import JobSpec
from ddpctl.words import plain


@dataclass(frozen=True, kw_only=True)
class Desk:
    """What every verb works with."""

    runner: Runner
    root: Path  # the folder of the runs
    say: Callable[[str], None]  # a line for a person


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be launched, once configuration and flags are one."""

    job: JobSpec
    target: str
    kind: str
    options: Any
    why: str  # what chose the target
    cwd: str
    name: str | None = None  # the run's exact name; None: one is made up
    resumes: Run | None = None  # the run from whose checkpoints it goes on


def open_desk(environ: Mapping[str, str]) -> Desk:
    """The desk of this process."""
    return Desk(runner=Runner(environ), root=runs.state_dir(environ), say=_say)


def _say(line: str) -> None:
    print(plain(line), file=sys.stderr)  # it may quote what a program of somebody said
