"""The ``ddpctl`` program and its subcommands. Converts errors to one-line messages and exit codes."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ddpctl.commands import checks, explain, hosts, image, launch, monitor, provision, runs, setup, timeline, top
from ddpctl.errors import DdpctlError
from ddpctl.execution import interrupts
from ddpctl.text import plain
from ddpwire.exits import Exit
from ddpwire.streams import open_closed


class OneLineErrors(TyperGroup):
    """A Typer group that prints errors as one line on stderr."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand. Convert an exception to a message and an exit code."""
        try:
            interrupts.raise_in_verb()
            result = super().invoke(ctx)
            sys.stdout.flush()  # here, where a failure can still be reported
            return result
        except DdpctlError as error:
            if str(error):  # else it was already reported
                print(plain(f"{error.prefix}{error}"), file=sys.stderr)
            raise typer.Exit(int(error.code)) from None
        except KeyboardInterrupt as error:
            raise typer.Exit(interrupts.code_of(error)) from None
        except BrokenPipeError:  # the reader (head, less) has ended
            _discard_stdout()
            raise typer.Exit(int(Exit.OK)) from None
        except OSError as error:
            if not error.filename:
                _discard_stdout()
            message, code = _message_of(error)
            print(f"ddpctl: {message}", file=sys.stderr)
            raise typer.Exit(int(code)) from None
        finally:
            interrupts.exit_silently()  # Python's own shutdown takes a moment, too


app = typer.Typer(
    cls=OneLineErrors,
    name="ddpctl",
    rich_markup_mode=None,  # rich would double the time of --help
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Run one PyTorch DDP training, unchanged, on the machines that you have.

    \b
    ddpctl launch                                 train on real digits, one CPU process or GPU
    ddpctl launch --nodes 2 --gpus 4              two nodes of four ranks, on this machine
    ddpctl launch --gpus 2 -- train.py --lr 0.1   your own script, as you would give it to torchrun
    ddpctl ps; ddpctl logs -f; ddpctl stop RUN    see to your runs
    """,
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=setup.print_version, is_eager=True, help="As ddpctl version.")
    ] = False,
) -> None:
    """Declare the options of ddpctl itself. The help text is an argument of ``app``."""


# In the order of --help.
for verb in (
    launch.launch, launch.render, runs.ps, runs.status, runs.logs, explain.explain, explain.profile, runs.stop, top.top,
    timeline.report, timeline.timeline, runs.rm, runs.attach, runs.execute, runs.shell, runs.suspend, runs.resume,
    runs.pull, runs.export, hosts.hosts, checks.bench, checks.doctor, provision.provision, setup.init, setup.schema,
    setup.version,
):  # fmt: skip
    app.command(name="exec" if verb is runs.execute else None, cls=launch.FieldHelp)(verb)
app.add_typer(image.app)
app.add_typer(monitor.app)


def _discard_stdout() -> None:
    """Discard the buffered output. Otherwise, Python would try to write it at exit and report an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message_of(error: OSError) -> tuple[str, Exit]:
    if error.filename:
        return f"{error.filename}: {error.strerror}", Exit.SOFTWARE
    try:
        Path.cwd()
    except OSError:
        return "the current folder no longer exists: cd to another one", Exit.NO_INPUT
    return f"cannot write the output: {error.strerror}", Exit.CANNOT_WRITE


def _hint(option: str) -> str:
    """Return the hint for an option that ``launch`` does not have."""
    from ddpctl.job.other_launchers import TORCHRUN, meaning_of

    if meaning := meaning_of(option, TORCHRUN):
        advice = f"use {meaning}" if meaning.startswith("--") else "leave it out, because ddpctl sets it"
        return f". {option} is an option of torchrun: {advice}"
    return ". Write -- before your script and its options, for example ddpctl launch -- train.py --lr 0.1"


def main() -> None:
    """Run ddpctl."""
    open_closed()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name may contain any bytes
    try:
        code = app(args=sys.argv[1:] or ["--help"], prog_name="ddpctl", standalone_mode=False)
    except Exception as error:
        if isinstance(error, typer.Abort):  # Ctrl-C before a verb has begun
            sys.exit(Exit.INTERRUPTED)
        if not (message := getattr(error, "format_message", None)):  # only usage errors of Typer have it
            raise
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "ddpctl"
        hint = _hint(str(getattr(error, "option_name", ""))) if path in ("ddpctl launch", "ddpctl render") else ""
        text = message()
        see = " See" if text.endswith((".", "?")) else "; see"
        print(f"ddpctl: {text}{see} {path} --help{hint}", file=sys.stderr)
        code = Exit.USAGE
    sys.exit(code)
