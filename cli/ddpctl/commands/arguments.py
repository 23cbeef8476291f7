"""Arguments and options that several subcommands have."""

import os
from typing import Annotated

import typer


def complete_run(incomplete: str) -> list[str]:
    """Return the names of runs that begin with ``incomplete``, for the shell's completion."""
    from ddpctl import run_store

    return [run.name for run in run_store.load_all(run_store.state_dir(os.environ)) if run.name.startswith(incomplete)]


RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's name or its beginning [default: the newest].", autocompletion=complete_run
    ),
]
WholeRunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's whole name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Task = Annotated[int | None, typer.Option("--task", min=0, metavar="K", help="Only this task of an array of runs.")]
Node = Annotated[int, typer.Option("--node", min=0, metavar="K", help="Which node, from 0.")]
