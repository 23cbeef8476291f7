"""Arguments, options and functions that several subcommands share."""

import json
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from ddpctl.errors import UsageError
from ddpctl.job.spec import check_time, time_s
from ddpctl.operations import launcher, run_folders
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_store import Run


def complete_run(incomplete: str) -> list[str]:
    """Return the names of the runs that begin with ``incomplete``, for completion in a shell."""
    return [run.name for run in run_store.load_all(run_store.state_dir(os.environ)) if run.name.startswith(incomplete)]


RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's name or its beginning [default: the newest].", autocompletion=complete_run
    ),
]
WholeRunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's whole name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Task = Annotated[int | None, typer.Option("--task", min=0, metavar="K", help="Only task K of an array of runs.")]
Node = Annotated[int, typer.Option("--node", min=0, metavar="K", help="The node's number, from 0.")]
Tail = Annotated[int | None, typer.Option("--tail", min=0, metavar="N", help="Start each log at its last N lines.")]
SshTarget = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", envvar="DDPCTL_TARGET", metavar="T", help="A target of kind ssh [default: the file's target]."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would run, but do not run it.")]


def find_run(name: str | None, task: int | None = None) -> tuple[AppContext, Run]:
    """Return the AppContext and the run with this name or folder. Raises NoInputError if there is no such run."""
    context = launcher.open_context()
    return context, launcher.find(context, name, task=task)


def has_name(run: Run) -> bool:
    """Return whether ``run_store.load`` finds the run or its array by name. All other runs have only a folder."""
    return not run_folders.is_by_hand(run) and _whole_folder(run).parent == run_store.state_dir(os.environ)


def _whole_folder(run: Run) -> Path:
    return Path(run.folder).parent if "task" in run.handle else Path(run.folder)


def whole_name(run: Run) -> str:
    """Return the name of the run. For a task, return the name of its array."""
    return run.name.removesuffix(f".task-{run.handle.get('task')}")


def run_arguments(run: Run, task: str | None = None) -> str:
    """Return the arguments with which ``find_run`` finds the run: its name or folder, and --task for a task.

    ``task`` selects a task if the run is an array.
    """
    which = whole_name(run) if has_name(run) else shlex.quote(str(_whole_folder(run)))
    task = task or run.handle.get("task")
    return f"{which} --task {task}" if task else which


def print_result(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """Print ``document`` if ``as_json`` is true, otherwise ``lines``."""
    for line in [json.dumps(document, indent=1)] if as_json else lines:
        print(line)
    sys.stdout.flush()  # here, where a failure can still be reported


def parse_time(option: str, text: str, *, example: str) -> int:
    """Convert the value of an option, such as ``2h30m``, to seconds. Raises UsageError if the value is invalid."""
    try:
        return time_s(check_time(text, example=example))
    except ValueError as error:
        raise UsageError(f"{option}: {text!r} is not allowed: {error}") from None
