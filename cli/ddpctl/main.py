"""The ``ddpctl`` program and its subcommands. Converts errors to one-line messages and exit codes."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from ddpctl.errors import DdpctlError
from ddpctl.execution import interrupts
from ddpctl.text import plain
from ddpwire.exits import Exit
from ddpwire.streams import open_closed

# In the order of --help: the name of each verb, its function in ddpctl.commands, and its first sentence.
VERBS: Mapping[str, tuple[str, str]] = {
    "launch": ("launch:launch", "Start a training and follow it to its end."),
    "render": ("launch:render", "Print a job as a file that runs without ddpctl."),
    "ps": ("runs:ps", "List runs, newest first."),
    "status": ("runs:status", "Show the state of a run, its nodes and its first failure."),
    "logs": ("runs:logs", "Print a run's logs, one node after another."),
    "explain": ("explain:explain", "Explain why a run hangs, is slow or has failed."),
    "profile": ("explain:profile", "Record a trace of what all ranks of a run do."),
    "stop": ("runs:stop", "Stop a run."),
    "top": ("watch:top", "Watch the ranks of a run while it trains."),
    "report": ("watch:report", "Write a report about a run as one HTML file."),
    "timeline": ("watch:timeline", "Show how a run's time was spent."),
    "rm": ("runs:rm", "Remove ended runs, with their checkpoints."),
    "attach": ("runs:attach", "Follow a run to its end, as if it had been launched here."),
    "exec": ("runs:execute", "Run a command on a node of a run."),
    "shell": ("runs:shell", "Open a shell on a node of a run."),
    "suspend": ("runs:suspend", "Stop a run's ranks and release its machines, but keep the run."),
    "resume": ("runs:resume", "Continue a suspended run."),
    "pull": ("runs:pull", "Copy a run's checkpoints, logs and weights to this machine."),
    "export": ("runs:export", "Write the weights in a run's checkpoint to one file."),
    "hosts": ("machines:hosts", "List SSH machines, their GPUs, and the run on each GPU."),
    "bench": ("checks:bench", "Measure the collectives and the links of a target."),
    "doctor": ("checks:doctor", "Check the nodes of a target and the network between them."),
    "rehearse": ("rehearse:rehearse", "Disturb a script as a cluster will, and say what it loses."),
    "provision": ("machines:provision", "Set up new machines as nodes, with Ansible playbooks."),
    "init": ("setup:init", "Write a commented ddpctl.yaml that fits this machine."),
    "schema": ("setup:schema", "Print the JSON schema of ddpctl.yaml, for use in an editor."),
    "version": ("setup:version", "Print the versions of ddpctl, Python and torch."),
    "image": ("image:app", "Build, push, ship and inspect the container image of a job."),
    "monitor": ("monitor:app", "Show all runs in Prometheus and Grafana."),
}


class FieldHelp(TyperCommand):
    """A command that describes a flag of a field with the documentation of the field."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        from ddpctl import targets
        from ddpctl.job.schema import documentation

        for parameter in self.params:
            if getattr(parameter, "help", "") is None:
                parameter.help = documentation(str(parameter.name), targets.kinds())  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


class Verbs(TyperGroup):
    """The group of the verbs. It prints errors as one line on stderr."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # Typer reads only the names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a verb as a command of Typer. Its module is imported only here."""
        if cmd_name not in VERBS:
            return None
        verb = resolve_name(f"ddpctl.commands.{VERBS[cmd_name][0]}")
        if not isinstance(verb, typer.Typer):
            alone = typer.Typer(rich_markup_mode=None, add_completion=False)
            alone.command(name=cmd_name, cls=FieldHelp)(verb)
            verb = alone
        return get_command(verb)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Print the list of the verbs, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])

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
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("ddpctl."):
                raise
            message = f"this ddpctl, such as that of a notebook's wheel, has no {error.name}"
            print(f"ddpctl: {message}: run the command where the whole ddpctl is installed", file=sys.stderr)
            raise typer.Exit(int(Exit.UNAVAILABLE)) from None
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


def _print_version(is_given: bool) -> None:
    if is_given:
        from ddpctl.commands import setup

        setup.version()
        raise typer.Exit


app = typer.Typer(
    cls=Verbs,
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="As ddpctl version.")
    ] = False,
) -> None:
    """Declare the options of ddpctl itself. The help text is an argument of ``app``."""


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
    from ddpctl.job.other_launchers import MODULE, TORCHRUN, meaning_of

    if (meaning := meaning_of(option, TORCHRUN)) and meaning != MODULE:
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
