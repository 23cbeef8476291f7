"""The verbs about runs that are there: ps, status, logs, stop."""

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from ddpctl.errors import UsageError

if TYPE_CHECKING:
    from ddpctl.launch import Desk
    from ddpctl.run import Run


def _complete_run(incomplete: str) -> list[str]:
    """Names of runs for the shell's completion."""
    from ddpctl import runs

    return [run.name for run in runs.load_all(runs.state_dir(os.environ)) if run.name.startswith(incomplete)]


RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]", help="A run's name or its beginning [default: the newest].", autocompletion=_complete_run
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def _find(name: str | None) -> "tuple[Desk, Run]":
    from ddpctl import launch, runs

    desk = launch.open_desk(os.environ)
    return desk, runs.load(desk.root, name)


def ps(
    as_json: Json = False,
    limit: Annotated[int, typer.Option("--last", "-n", min=0, help="Only the newest N; 0: all of them.")] = 20,
) -> None:
    """List runs, newest first."""
    from ddpctl import launch, runs
    from ddpctl.commands import show

    desk = launch.open_desk(os.environ)
    found = runs.load_all(desk.root)
    shown = found[:limit] if limit else found
    rows = list(zip(shown, launch.status(desk, shown), strict=True))
    if as_json:
        print(json.dumps([show.as_json(run, state) for run, state in rows], indent=1))
        return
    if not rows:
        desk.say(f"no run yet in {desk.root}: start one with ddpctl launch")
        return
    for line in show.runs_table(rows, time.time()):
        print(line)
    if len(shown) < len(found):
        desk.say(f"{len(found) - len(shown)} older: ddpctl ps --last 0")


def status(run: RunName = None, as_json: Json = False) -> None:
    """Say how a run fares, node by node, and who failed first."""
    from ddpctl import launch
    from ddpctl.commands import show

    desk, record = _find(run)
    (state,) = launch.status(desk, (record,))
    if as_json:
        print(json.dumps(show.as_json(record, state), indent=1))
        return
    for line in show.status_lines(record, state):
        print(line)


def logs(
    run: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", min=0, help="Only this rank; may be repeated.")
    ] = None,
    node: Annotated[list[int] | None, typer.Option("--node", min=0, help="Only this node; may be repeated.")] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, metavar="N", help="Begin with the last N lines of each log.")
    ] = None,
) -> None:
    """Print a run's logs; each line says its node and rank."""
    from ddpctl import launch
    from ddpctl.targets import LogQuery

    desk, record = _find(run)
    query = LogQuery(follow=follow, nodes=tuple(node or ()), ranks=tuple(rank or ()), tail=tail)
    desk.runner.perform(launch.target_of(record).logs(record, query))


def stop(
    run: RunName = None,
    kill: Annotated[bool, typer.Option("--kill", help="At once, without a checkpoint.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Every run that goes on.")] = False,
) -> None:
    """Let a run save and stop.

    It is killed when its grace is over. Nothing of it is left afterwards.
    """
    from ddpctl import launch, runs

    if (run is None) == (not every):
        raise UsageError("stop: name a run, or --all (ddpctl ps lists them)")
    desk = launch.open_desk(os.environ)
    asked = runs.load_all(desk.root) if every else (runs.load(desk.root, run),)
    going = [record for record, state in zip(asked, launch.status(desk, asked), strict=True) if not state.ended]
    for record in going:
        state = launch.stop(desk, record, kill=kill)
        desk.say(f"run {record.name} {state.state}, exit code {state.code}: {state.message}")
    if not going:
        desk.say("no run goes on" if every else f"run {asked[0].name} has ended already: nothing to stop")


def register(app: typer.Typer) -> None:
    """Add these verbs to the program."""
    app.command()(ps)
    app.command()(status)
    app.command()(logs)
    app.command()(stop)
