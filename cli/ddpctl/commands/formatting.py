"""Formats runs as text for a terminal, and as JSON."""

import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ddpctl.commands.arguments import has_name, run_arguments, whole_name
from ddpctl.files.images import human_size
from ddpctl.job.launch_plan import command_line, title
from ddpctl.runs.run_status import NodeReport, RunStatus, have_steps
from ddpctl.runs.run_store import DiskUsage, Run, folders_above, has_checkpoint
from ddpctl.text import cut, format_duration, number, one_line, table
from ddpwire.exits import Exit

TAKE_TASK = "logs, explain, profile, top, timeline, report"  # the subcommands besides status that have --task


def ago(seconds: float) -> str:
    """Format a duration in one unit, for example 12 s, 3 min, 5 h or 2 d."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def fit(line: str, spare: int = 0) -> str:
    """Cut a line so that ``spare`` columns of the terminal stay free. Without a terminal, return the line unchanged."""
    if not sys.stdout.isatty():
        return line
    plain = not (sys.stdout.encoding or "").lower().startswith("utf")
    return cut(line, max(12, shutil.get_terminal_size().columns - spare), plain=plain)


def runs_table(rows: list[tuple[Run, RunStatus]], now: float) -> list[str]:
    """Return the table of ``ddpctl ps``."""
    lines = [("RUN", "STATE", "EXIT", "STEP", "SIZE", "TARGET", "LAUNCHED", "PROGRAM")]
    for run, state in rows:
        code, size = "-" if state.code is None else str(state.code), run.job.size
        launched = f"{ago(now - run.created)} ago"
        name, program = fit(run.name, spare=60), one_line(command_line(run.job))  # for STATE, EXIT and STEP
        lines.append((name, state.state, code, _steps(state), size, one_line(run.target), launched, program))
    return table(lines)


def _steps(state: RunStatus) -> str:
    at = state.progress
    if at is None:
        return "-"
    loss = "" if at.loss is None else f", loss {number(at.loss)}"
    remaining = f", {format_duration(at.left_s)} left" if state.alive and at.left_s is not None else ""
    return f"{at.step}{f'/{at.planned}' if at.planned else ''}{loss}{remaining}"


def progress_lines(state: RunStatus) -> list[str]:
    """Return one line about the progress of the training. The list is empty if the run reports no progress."""
    at = state.progress
    if at is None:
        return []
    parts = [f"step {at.step}{f' of {at.planned}' if at.planned else ''}"]
    parts += [] if at.loss is None else [f"loss {number(at.loss)}"]
    parts += [] if not state.alive or at.left_s is None else [f"{format_duration(at.left_s)} left"]
    parts += [] if at.epoch is None else [f"epoch {at.epoch}"]
    parts += [f"{at.steps_per_s:.3g} steps/s"] if state.alive and at.steps_per_s else []
    parts += [] if at.checkpoint_step is None else [f"last checkpoint at step {at.checkpoint_step}"]
    return [f"  progress     {', '.join(parts)}"]


def status_lines(run: Run, state: RunStatus, tasks: Sequence[Run] = ()) -> list[str]:
    """Return the lines of ``ddpctl status``: the run, then one line for each node, or for each of the ``tasks``."""
    ending = "" if state.code is None else f", exit code {state.code}"
    lines = [
        f"{run.name}  {state.state}{ending}: {one_line(state.message)}",
        f"  {one_line(title(run.job))} on {one_line(run.target)}, launched {ago(time.time() - run.created)} ago",
        *map(fit, progress_lines(state)),
        *_places(run, state)[: 1 if tasks else 2],
    ]
    if tasks:
        return [*lines, *_task_lines(run, state, tasks)]
    return [*lines, *_nodes_table(state), *_notice_lines(state), *next_steps(run, state)]


def _nodes_table(state: RunStatus) -> list[str]:
    """Return a table with a row for each node. Without living nodes, a column without a value is left out."""
    places = [
        report.node if report.number == report.node else f"{report.node} as {report.number}" for report in state.nodes
    ]
    rows = [(f"  {place}", *_node_cells(report, state)) for place, report in zip(places, state.nodes, strict=True)]
    if not rows:
        return []
    if not state.ended and any(report.state for report in state.nodes):
        return table([("  NODE", "STATE", "PID", "RANK:PID", "METRICS"), *rows])
    ranks = "RANK:PID" if any(":" in row[3] for row in rows) else "RANKS"
    columns = zip(("  NODE", "STATE", "PID", ranks, "METRICS"), *rows, strict=True)
    shown = [column for column in columns if set(column[1:]) != {"-"}]
    return table([tuple(row) for row in zip(*shown, strict=True)])


def _notice_lines(state: RunStatus) -> Iterator[str]:
    """Yield a line for each notice that was not sent, as far as is known."""
    for report in state.nodes:
        for notice in report.state.notices if report.state else ():
            if notice.state == "failed":
                yield f"  the notice of '{notice.event}' to {one_line(notice.to)} failed: {one_line(notice.why)}"
            elif notice.state == "sending" and not report.alive:
                reason = "its node ended while it was sent"
                yield f"  whether the notice of '{notice.event}' to {one_line(notice.to)} was sent is unknown: {reason}"


def _node_cells(report: NodeReport, state: RunStatus) -> tuple[str, str, str, str]:
    node = report.state
    if node is None:
        known = "starting" if report.alive else "ended" if report.outcome else "not started"
        return one_line(report.note) or known, "-", "-", "-"
    # The ranks of an attempt that has ended.
    are_old = not report.alive or node.state in ("starting", "rendezvous")
    ranks = " ".join(str(rank.rank) if are_old else f"{rank.rank}:{rank.pid}" for rank in node.ranks)
    if not report.alive:
        return "ended" if report.outcome else "killed", "-", ranks or "-", "-"
    doing = "running" if node.state == "training" and not have_steps(state.nodes) else one_line(node.state)
    return doing, str(node.pid), ranks or "-", one_line(node.metrics or "-")


def _task_lines(run: Run, state: RunStatus, tasks: Sequence[Run]) -> list[str]:
    rows = [("  TASK", "STATE", "EXIT", "STEP", "PROGRAM", "CHECKPOINTS")]
    for task, own in zip(tasks, state.tasks, strict=True):
        own_variables = (f"{name}={value}" for name, value in task.job.env.items() if run.job.env.get(name) != value)
        rows.append(
            (
                f"  {task.name.rpartition('-')[2]}",
                own.state,
                "-" if own.code is None else str(own.code),
                _steps(own),
                one_line(" ".join((*own_variables, command_line(task.job)))),
                one_line(task.checkpoint_dir),
            )
        )
    which = run_arguments(run, "K")
    return [*table(rows), f"  one task     ddpctl status {which}; {TAKE_TASK} take it, too"]


def can_resume(run: Run, state: RunStatus) -> bool:
    """Return whether a launch with --resume can continue the run from a checkpoint."""
    is_failure = bool(state.code) and state.code != Exit.CONFIG  # the same settings would be refused again
    return state.ended and is_failure and state.has_files and has_checkpoint(run) and has_name(run)


def next_steps(run: Run, state: RunStatus) -> list[str]:
    """Return lines with the commands that help after a run has failed."""
    lines = []
    if state.outcome and state.outcome.rank is not None and state.state == "failed":
        task = next((own.run.rpartition("-")[2] for own in state.tasks if own.outcome == state.outcome), None)
        lines.append(f"  read         ddpctl logs {run_arguments(run, task)} --rank {state.outcome.rank}")
    if can_resume(run, state):
        task = run.handle.get("task")
        only = f" --array {task}, after all tasks have ended" if task else ""
        lines.append(f"  resume with  ddpctl launch --resume {whole_name(run)}{only}{_if_saved(run, state)}")
    return lines


def closing_lines(run: Run, state: RunStatus, *, code: int) -> list[str]:
    """Return the lines that ``launch`` and ``attach`` print after the run's end. ``code`` is ddpctl's exit code."""
    ending = f", exit code {state.code}" if state.code else ""
    message = f": {one_line(state.message)}" if state.message else ""
    if state.state == "unknown":
        return [f"run '{run.name}' {state.state}{message}", *_places(run, state)]
    lines = [f"run '{run.name}' {state.state}{ending}, after {format_duration(time.time() - run.created)}{message}"]
    lines += [*_places(run, state), *next_steps(run, state)]
    if code in (state.code, Exit.OK):
        return lines
    reason = "you pressed Ctrl-C" if code == Exit.INTERRUPTED else "it was asked to end"
    return [*lines, f"  {reason}: ddpctl exits with {code}"]


def _places(run: Run, state: RunStatus) -> list[str]:
    logs = [f"  logs         {one_line(run.logs_at)}"] if state.has_logs else []
    if not (state.has_files and has_checkpoint(run)):
        return logs
    return [*logs, f"  checkpoints  {one_line(run.checkpoint_dir)}{_if_saved(run, state)}"]


def _if_saved(run: Run, state: RunStatus) -> str:
    """Return an addition to the line about checkpoints if it is unknown whether the run has saved one, otherwise ""."""
    is_known = not run.elsewhere or bool(state.progress and state.progress.checkpoint_step)
    return "" if is_known else ", if it has saved a checkpoint"


def removed_lines(
    run: Run, folders: Sequence[DiskUsage], *, dry_run: bool, others: Collection[str] = (), has_files: bool = True
) -> list[str]:
    """Return the lines of ``ddpctl rm`` about one run: the folders that are removed, and the folders that are kept.

    ``others`` are the folders that are removed with other runs. ``has_files`` is whether the run's checkpoints exist.
    """
    size, checkpoints = sum(folder.size for folder in folders), sum(folder.checkpoints for folder in folders)
    would = " would be" if dry_run else ""
    lost = f"{human_size(checkpoints)} of it checkpoints" if checkpoints else f"no checkpoints{would} deleted"
    lines = [f"run '{run.name}'{would or ' is'} removed: {human_size(size)}{would} freed, {lost}"]
    lines += [f"  folder  {folder}" for folder in folders]
    lines += [f"  deleted {folder.made} (made by the script, in {folder})" for folder in folders if folder.made]
    lines += [f"  kept    {path} (the target of a link in {folder})" for folder in folders for path in folder.stays]
    removed = {*others, *(name for folder in folders for name in folder.names)}
    if has_files and run.checkpoint_dir and removed.isdisjoint(folders_above(run.checkpoint_dir)):
        lines.append(f"  kept    {run.checkpoint_dir} (checkpoints)")
    if run.job.checkpoint_dir:
        lines.append(f"  kept    {run.job.checkpoint_dir} (copies of checkpoints)")
    return lines


def as_json(run: Run, state: RunStatus, tasks: Sequence[Run] = ()) -> dict[str, Any]:
    """Return a run and its status as a document for ``--json``."""
    own = zip(tasks, state.tasks, strict=True) if tasks else ()
    return {
        "run": run.name,
        "state": state.state,
        "code": state.code,
        "message": state.message,
        "target": run.target,
        "kind": run.kind,
        "created": run.created,
        "nodes": run.job.nodes,
        "gpus": run.job.gpus,
        "ranks": [len(run.job.ranks_on(n)) for n in range(run.job.max_nodes)]
        if run.job.is_uneven
        else run.job.local_world_size,
        "program": command_line(run.job),
        "folder": run.folder,
        "checkpoint_dir": run.checkpoint_dir,
        "outcome": asdict(state.outcome) if state.outcome else None,
        "progress": asdict(state.progress) | {"left_s": state.progress.left_s} if state.progress else None,
        "node_reports": [asdict(report) for report in state.nodes],
        **({"tasks": [as_json(task, status) | {"env": task.job.env} for task, status in own]} if tasks else {}),
    }
