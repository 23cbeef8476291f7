"""Most subcommands for existing runs, such as ``ps``, ``status``, ``logs`` and ``stop``."""

import re
import shlex
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from ddpctl import targets
from ddpctl.command import Command, once
from ddpctl.commands import explain, formatting
from ddpctl.commands.arguments import (
    Json,
    Node,
    RunName,
    Tail,
    Task,
    WholeRunName,
    complete_run,
    find_run,
    has_name,
    parse_time,
    print_result,
    whole_name,
)
from ddpctl.errors import DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.execution import interrupts
from ddpctl.job.launch_plan import TRAINER, program
from ddpctl.operations import launcher, removal, run_folders
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus, machine_of
from ddpctl.runs.run_store import Run
from ddpctl.targets import LogQuery, no_such_log
from ddpctl.text import EscapeFilter, one_line, quote
from ddpwire.exits import Exit


def ps(
    as_json: Json = False,
    limit: Annotated[int, typer.Option("--last", "-n", min=0, help="List only the newest N runs. 0 means all.")] = 20,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="List the runs in this folder, also those started by hand."),
    ] = None,
) -> None:
    """List runs, newest first.

    To list runs that were started by hand, with sbatch or ddprun --run-dir, use --folder. status, logs, explain,
    profile, top, timeline, report and export take the folder of such a run instead of a name.
    """
    context = launcher.open_context()
    root = folder or context.root
    runs = run_folders.load_all(folder.absolute()) if folder else run_store.load_all(root)
    shown = runs[:limit] if limit else runs
    rows = list(zip(shown, launcher.status(context, shown), strict=True))
    if as_json:
        print_result([formatting.as_json(run, state) for run, state in rows], (), as_json=True)
        return
    if torn := run_store.unreadable(root, runs):
        context.emit(f"skipped runs whose record cannot be read: {', '.join(quote(folder.name) for folder in torn)}")
    if not rows:
        context.emit(f"no run in {folder}" if folder else f"no run yet in {context.root}: start one with ddpctl launch")
        return
    for line in formatting.runs_table(rows, time.time()):
        print(formatting.fit(line))
    if len(shown) < len(runs):
        context.emit(f"{len(runs) - len(shown)} older runs: ddpctl ps --last 0 lists all")


def status(run: RunName = None, task: Task = None, as_json: Json = False) -> None:
    """Show the state of a run, its nodes and its first failure."""
    context, record = find_run(run, task)
    (state,) = launcher.status(context, (record,))
    tasks = launcher.target_of(record).tasks(record) if state.tasks else ()
    hang_lines = () if as_json else explain.hang_lines(context, record, state)
    lines = (*formatting.status_lines(record, state, tasks), *hang_lines)
    print_result(formatting.as_json(record, state, tasks), lines, as_json=as_json)


def logs(
    run: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", min=0, help="Only this global rank. May be repeated.")
    ] = None,
    node: Annotated[list[int] | None, typer.Option("--node", min=0, help="Only this node. May be repeated.")] = None,
    task: Task = None,
    tail: Tail = None,
    raw: Annotated[bool, typer.Option("--raw", help="Keep escape sequences, such as colors, on a terminal.")] = False,
    timestamps: Annotated[
        bool,
        typer.Option(
            "--timestamps",
            help="Print the whole output of the ranks. Each line has its time (its node's clock); without -f, lines "
            "are sorted by time. Omits lines without a time.",
        ),
    ] = False,
) -> None:
    """Print a run's logs, one node after another.

    Each line begins with its node and rank. With -f, a line is printed as soon as it is written. If a rank fails, the
    tracebacks that this causes in other ranks are left out; --rank and --timestamps print them.
    """
    context, record = find_run(run, task)
    if launcher.is_unplaced(record):
        raise _no_log(record, launcher.status(context, (record,))[0])
    is_limited = bool(rank or node)
    if node and record.job.spares:
        (state,) = launcher.status(context, (record,))
        node = [machine_of(state.nodes, number) for number in node]
    if not rank and run_folders.is_by_hand(record):  # the nodes of such a run have no node.log
        rank = list(range(record.job.world_size))
    if sys.stdout.isatty() and not raw:
        context.executor.filter_stdout(EscapeFilter())
    query = LogQuery(follow=follow, nodes=tuple(node or ()), ranks=tuple(rank or ()), tail=tail, timestamps=timestamps)
    try:
        with context.executor.sorted_stdout() if timestamps and not follow else nullcontext():
            context.executor.perform(launcher.target_of(record).logs(record, query))
    except NoInputError as error:
        if error.fields.get("no_such_log"):
            (state,) = launcher.status(context, (record,))
            if not is_limited and not (timestamps and (state.outcome or any(node.state for node in state.nodes))):
                raise _no_log(record, state) from None
            error = no_such_log(record, query, yet=not state.ended and bool(query.files(record)))
        hint = "without --timestamps, ddpctl logs also prints lines whose time is not known" * timestamps
        raise NoInputError(str(error), hint=hint) from None
    except KeyboardInterrupt as error:
        if not launcher.status(context, (record,))[0].ended:
            tasks = " (all tasks)" if whole_name(record) != record.name else ""
            context.emit(f"run '{record.name}' keeps running; to stop it{tasks}, {_how_to_stop(record)}")
        raise typer.Exit(interrupts.code_of(error)) from None


def _how_to_stop(run: Run) -> str:
    """Return a phrase that says how a user can stop a run, which may have only a folder."""
    if has_name(run):
        return f"use ddpctl stop {whole_name(run)}"
    if run_folders.is_by_hand(run):
        return launcher.target_of(run).how_to_stop_by_hand(run)
    return f"use DDPCTL_STATE_DIR={shlex.quote(str(Path(run.folder).parent))} ddpctl stop {run.name}"


def _no_log(run: Run, state: RunStatus) -> NoInputError:
    """Return the error for a run without any log."""
    absence = "has no log" if state.ended else "has written no log yet"
    return NoInputError(f"run '{run.name}' {absence}; its state is {state.state}: {one_line(state.message)}")


def stop(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The run's whole name.", autocompletion=complete_run)
    ] = None,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the run at once, without a checkpoint.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Stop every run that has not ended.")] = False,
) -> None:
    """Stop a run. Its ranks are asked to save first.

    Ranks that have not ended after the grace period are killed. No process of the run remains.
    """
    if (run is None) == (not every):
        raise UsageError("stop: give the name of a run, or --all (ddpctl ps lists the runs)")
    context = launcher.open_context()
    if run and "/" in run:
        how = _how_to_stop(launcher.find(context, run))
        raise NoInputError(f"{run} is a folder, but ddpctl stop takes only the name of a run: to stop this run, {how}")
    requested = run_store.load_all(context.root) if every else (run_store.load(context.root, run, whole=True),)
    states = list(zip(requested, launcher.status(context, requested), strict=True))
    # A run in the state lost may have left processes or files. --kill removes them.
    going = {
        record.name: (record, state)
        for record, state in states
        if (not state.ended or (kill and state.state == "lost")) and (not every or state.state != "unknown")
    }
    for record, before in going.values():
        try:
            state = launcher.stop(context, record, kill=kill, before=before)
        except KeyboardInterrupt as error:
            context.emit(f"run '{record.name}' is still stopping; ddpctl status {record.name} shows its state")
            raise typer.Exit(interrupts.code_of(error)) from None
        if not state.ended:
            wrong = UnavailableError if state.state == "unknown" else DdpctlError
            raise wrong(f"run '{record.name}' has not ended: {state.state}, {state.message}")
        context.emit(f"run '{record.name}' {state.state}, exit code {state.code}: {state.message}")
        for line in formatting.next_steps(record, state):
            context.emit(line)
    ended = [(record, state) for record, state in states if record.name not in going]
    cleared = [record for record, state in ended if targets.may_leave(record, state) and not every]
    for record in cleared:
        context.executor.perform(launcher.clear(record))
        context.emit(f"run '{record.name}' had already ended; its remaining processes and files were removed")
    if not going and not cleared:
        context.emit("no run is active" if every else f"run '{requested[0].name}' has already ended: nothing to stop")


def suspend(run: WholeRunName) -> None:
    """Stop a run's ranks and release its machines, but keep the run.

    This works only on Kubernetes. The ranks save before they stop. ddpctl resume continues from the last checkpoint.
    """
    _set_suspended(run, again=False)


def resume(run: WholeRunName) -> None:
    """Continue a suspended run. To continue a run that has ended, use ddpctl launch --resume."""
    _set_suspended(run, again=True)


def attach(run: RunName = None, tail: Tail = None) -> None:
    """Follow a run to its end, as if it had been launched here.

    The exit code is that of the run. The first Ctrl-C asks the ranks to save and stop; the exit code is then 130. The
    second Ctrl-C kills the ranks. To follow a run that Ctrl-C must not stop, use ddpctl logs -f.
    """
    context, record, _ = _find_going(run)
    state, code = launcher.follow(context, record, tail=tail)
    explain.emit_end(context, record, state, code)
    raise typer.Exit(int(code))


def execute(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or the beginning of its name.")],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The command and its arguments.")],
    node: Node = 0,
) -> None:
    """Run a command on a node of a run.

    The command runs in the container of the node, or on its machine if the node has no container.

    \b
    ddpctl exec night --node 1 -- nvidia-smi
    """
    context, record, state = _find_going(run)
    node = machine_of(state.nodes, node)
    tty = sys.stdin.isatty() and sys.stdout.isatty()
    raise typer.Exit(launcher.execute(context, record, node=node, argv=tuple(command), tty=tty))


def shell(run: RunName = None, node: Node = 0) -> None:
    """Open a shell on a node of a run. If the node has a container, the shell runs in it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("shell: this is not a terminal; ddpctl exec RUN -- COMMAND runs a command without a terminal")
    context, record, state = _find_going(run)
    raise typer.Exit(launcher.execute(context, record, node=machine_of(state.nodes, node), argv=(), tty=True))


def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN", help="The whole names of the runs.", autocompletion=complete_run),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="All ended runs whose start is this long ago: 30d, 12h."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
) -> None:
    """Remove ended runs, with their checkpoints.

    This deletes a run's record and its folders, here and on the machines where the run was. Outside these folders, it
    deletes only the GPU reservations of ended runs on SSH hosts.
    """
    if bool(names) == bool(older_than):
        raise UsageError("rm: give names of runs, or --older-than 30d (ddpctl ps lists the runs)")
    context = launcher.open_context()
    if older_than:
        all_ages = re.fullmatch(r"0[smhd]", older_than)
        before = time.time() - (0 if all_ages else parse_time("--older-than", older_than, example="30d"))
        requested = tuple(run for run in run_store.load_all(context.root) if run.created < before)
    else:
        requested = tuple(run_store.load(context.root, name, whole=True) for name in dict.fromkeys(names or ()))
    removals, refused = removal.choose_removals(context, requested)
    if refused and not older_than:  # if runs are given by name, either all of them are removed or none
        raise type(refused[0])("\n".join(map(str, refused)))
    for error in refused:
        context.emit(str(error))
    folders = {name for each in removals for place in each.folders for name in place.names}
    results = [each.folders for each in removals] if dry_run else removal.remove_runs(context, removals)
    failed = [error for error in results if isinstance(error, DdpctlError)]
    for each, usage in zip(removals, results, strict=True):
        if not isinstance(usage, DdpctlError):
            has_files = each.state.has_files
            lines = formatting.removed_lines(each.run, usage, dry_run=dry_run, others=folders, has_files=has_files)
            print("\n".join(lines))
    if failed:
        raise type(failed[0])("\n".join(map(str, failed)))
    if not removals:
        context.emit(f"nothing to remove: no ended run was started more than {older_than} ago")


def _find_going(name: str | None) -> tuple[AppContext, Run, RunStatus]:
    context = launcher.open_context()
    run = run_store.load(context.root, name)
    (state,) = launcher.status(context, (run,))
    if not state.ended and run_store.unfinished_launch(run) and not state.alive:
        raise UnavailableError(f"run '{run.name}' has no node yet: {state.message}")
    if state.ended:
        raise NoInputError(f"run '{run.name}' has ended ({state.state}): see ddpctl status {run.name}")
    return context, run, state


def _set_suspended(name: str, *, again: bool) -> None:
    context = launcher.open_context()
    run = run_store.load(context.root, name, whole=True)
    (state,) = launcher.status(context, (run,))
    if not state.ended and launcher.is_unplaced(run):
        raise UnavailableError(f"run '{run.name}' has no node yet: {state.message}")
    if state.ended:
        hint = f"ddpctl launch --resume {run.name} continues it" if formatting.can_resume(run, state) else ""
        raise UsageError(f"run '{run.name}' has already ended ({state.state})", hint=hint)
    context.executor.perform(launcher.target_of(run).suspend(run, again=again))
    grace = f"ranks that are running have {run.job.grace:g} s to save"
    suspended = f"is suspended: {grace}; continue it with ddpctl resume {run.name}"
    context.emit(f"run '{run.name}' {f'continues: follow it with ddpctl logs -f {run.name}' if again else suspended}")


def pull(
    run: RunName = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="FOLDER", help="The folder to copy to [default: output in the run's folder]."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Of the checkpoints, copy only the one with the highest test accuracy.")
    ] = False,
) -> None:
    """Copy a run's checkpoints, logs and weights to this machine.

    Only files that are missing here are copied. If a pull was interrupted, the next one continues it.
    """
    context = launcher.open_context()
    record = run_store.load(context.root, run)
    print(launcher.pull(context, record, into, best=best))


def export(
    run: RunName = None,
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write, .pt or .safetensors.")] = Path(
        "weights.pt"
    ),
    best: Annotated[
        bool,
        typer.Option("--best", help="Use the checkpoint with the highest test accuracy instead of the newest one."),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option("--part", metavar="NAME", help="Which weights: model or ema [default: ema if it exists]."),
    ] = None,
) -> None:
    """Write the weights in a run's checkpoint to one file.

    The program of the run must be ddptrain. For a folder of checkpoints, use ddptrain export.

    \b
    ddpctl export night
    ddpctl export night weights.safetensors --best
    """
    context, record = find_run(run)
    folder = run_store.checkpoints_here(record)
    argv, other = program(record.job.command), ""
    if argv[:2] != TRAINER and not (folder and run_store.has_ddptrain_checkpoint(folder)):
        name = " ".join(argv[:2] if argv[0] == "-m" else argv[:1])
        other = f"run '{record.name}' ran {name}, not ddptrain: export reads only checkpoints of ddptrain (step-*.pt)"
    if other and folder is None:
        raise NoInputError(other)
    if folder is None:
        can_pull = record.job.checkpoint_dir or "pull" in targets.capabilities(record.kind)
        raise NoInputError(
            f"the checkpoints of run '{record.name}' are not on this machine, but in {record.checkpoint_dir}",
            hint=f"fetch them with ddpctl pull {record.name}" if can_pull else "run ddptrain export FOLDER there",
        )
    python = "" if record.elsewhere else record.options.get("python")
    options = ["--best"] * best + (["--part", part] if part else [])
    argv = (str(python or sys.executable), "-P", "-m", "ddptrain", "export", *options, "--", str(folder), str(file))
    done = context.executor.perform(once(Command(argv=argv, timeout_s=600)))
    if other and done.returncode == Exit.NO_INPUT:
        raise NoInputError(f"{other}, and {folder} has none")
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    raise typer.Exit(done.returncode)
