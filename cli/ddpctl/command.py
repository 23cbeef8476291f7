"""What a target wants done, as values: commands, and what came of them. Touches nothing.

A verb of a target is a generator: it yields commands that may run side by side, is sent their outputs in
the same order, and returns its result. ``runner`` performs it; a dry run prints it; a test feeds it
recorded answers.
"""

import shlex
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Mode = Literal[
    "capture",  # wait for it, keep what it wrote
    "stream",  # wait for it, its stdout is ours
    "background",  # start it in a session of its own, its stdout and stderr go to the file `output`
    "tty",  # wait for it, the terminal is its own: a shell, an attached process
]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to run."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    cwd: str | None = None
    stdin: str | None = None  # capture: what it reads; None: nothing
    secret: bool = False  # what it reads is for no eye: a dry run does not show it
    mode: Mode = "capture"
    output: str | None = None  # background: the file that takes what it writes; its folder is made
    tether: bool = False  # background: it gets DDP_LIFELINE_FD, which closes when this ddpctl ends
    timeout_s: float | None = 30.0  # None: as long as it takes (stream, tty)
    probe: bool = False  # it only looks and changes nothing: a dry run performs it too
    placeholder: str = ""  # what stands for its stdout in a dry run that does not perform it


@dataclass(frozen=True, kw_only=True)
class Output:
    """What came of a command. A program that is not there answers 127, one that took too long 124, as in a shell."""

    returncode: int
    stdout: str = ""
    stderr: str = ""


_END = "END_OF_INPUT"
T = TypeVar("T")
Verb = Generator[tuple[Command, ...], tuple[Output, ...], T]


def shell_line(command: Command) -> str:
    """The command as a person would type it into a shell."""
    words = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    words += [shlex.quote(word) for word in command.argv]
    line = " ".join(words)
    if command.cwd:
        line = f"cd {shlex.quote(command.cwd)} && {line}"
    if command.mode == "background":
        line += f" >{shlex.quote(command.output or '/dev/null')} 2>&1 &"
    if command.stdin is not None:
        text = "[REDACTED]" if command.secret else command.stdin.removesuffix("\n")
        line += f" <<'{_END}'\n{text}\n{_END}"
    return line
