"""What a target wants done, as values: commands, and what came of them. Performs nothing.

A verb of a target is a generator: it yields commands that may run side by side, is sent their outputs in
the same order, and returns its result. ``executor`` performs it; a dry run prints it; a test feeds it
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
    "hold",  # on a host: keep what its first line says, and let it continue until the verb ends
    "tty",  # wait for it, the terminal is its own: a shell, an attached process
]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another machine, as ssh takes it; what is None here is what ~/.ssh/config says."""

    address: str  # a name of ~/.ssh/config, of the network, or an IP address
    user: str | None = None
    port: int | None = None
    key: str | None = None  # the path of a private key here

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A piece of a file of this machine."""

    path: str
    start: int  # in bytes, as is
    length: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a command moves between machines: how much of it is done is shown while it runs.

    Its timeout_s is then how long nothing may move. OpenSSH's own client carries it, and not Fabric: it is several
    times as fast.
    """

    num_bytes: int
    num_files: int
    reads: str | None = None  # a file of this machine that is its stdin
    writes: tuple[FilePart, ...] = ()  # its stdout goes into these, one after another; their folders are made
    rsync_to: Host | None = None  # argv is rsync's, on this machine: the machine that it logs in to


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to run."""

    argv: tuple[str, ...]
    host: Host | None = None  # None: this machine. On another the mode is capture, stream, hold or tty
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    cwd: str | None = None
    stdin: str | None = None  # capture: what it reads; None: nothing
    part: FilePart | None = None  # capture, on a host: what it reads, in the place of stdin
    transfer: Transfer | None = None
    secret: bool = False  # its stdin is never shown, also not by a dry run
    mode: Mode = "capture"
    output: str | None = None  # background: the file that takes what it writes; its folder is made
    stdin_inherited: bool = False  # background: it reads from ddpctl's own stdin, in place of nothing
    tether: bool = False  # background: it gets DDP_LIFELINE_FD, which closes when this ddpctl ends
    kills_orphans: bool = False  # tty: after a Ctrl-C, what its processes have left behind is killed
    timeout_s: float | None = 30.0  # None: as long as it takes (stream, tty)
    probe: bool = False  # it only looks and changes nothing: a dry run performs it too
    say: str = ""  # what the user reads before it runs; once for all that are yielded together
    placeholder: str = ""  # what stands for its stdout in a dry run that does not perform it


# The return codes of what could not be run to its end, as a shell, timeout(1) and ssh have them.
NOT_FOUND, TIMED_OUT, UNREACHED = 127, 124, 255
NO_GPU = (NOT_FOUND, 6)  # of nvidia-smi: it is not there, or finds no device (its manual page)


@dataclass(frozen=True, kw_only=True)
class Output:
    """What came of a command.

    A program that is not there answers NOT_FOUND, one that took too long TIMED_OUT, a host that could not be reached,
    or was lost, UNREACHED, each with a sentence on stderr.
    """

    returncode: int
    stdout: str = ""
    stderr: str = ""

    def last_line(self, otherwise: str = "") -> str:
        """What it said last on stderr; where that is nothing ``otherwise``, or its exit code."""
        lines = self.stderr.strip().removesuffix("tar: Exiting with failure status due to previous errors").splitlines()
        return lines[-1] if lines else otherwise or f"exit code {self.returncode}"


_END = "END_OF_INPUT"
BRIEF = 200  # characters
T = TypeVar("T")
Verb = Generator[tuple[Command, ...], tuple[Output, ...], T]


def process_line(command: Command) -> str:
    """Environment, folder and arguments as a user would type them into a shell on the machine itself."""
    words = [f"{name}={shlex.quote(value)}" for name, value in command.env.items()]
    words += [shlex.quote(word) for word in command.argv]
    line = " ".join(words)
    return f"cd {shlex.quote(command.cwd)} && {line}" if command.cwd else line


def brief(command: Command) -> str:
    """The program and its arguments, for an error: without variables, and no longer than a line."""
    line = shlex.join(command.argv)
    return line if len(line) <= BRIEF else f"{line[:BRIEF]}..."


def shell_line(command: Command) -> str:
    """The command as a user would type it into a shell of this machine."""
    line = process_line(command)
    if command.host:
        tty = ("-t",) if command.mode == "tty" else ()
        line = shlex.join([*_ssh(command.host), *tty, "--", command.host.address, line])
    if command.mode == "background":
        line += f" >{shlex.quote(command.output or '/dev/null')} 2>&1 &"
    if command.part is not None:
        part = command.part
        line = f"tail -c +{part.start + 1} {shlex.quote(part.path)} | head -c {part.length} | {line}"
    if command.transfer is not None:
        moved = command.transfer
        if moved.rsync_to:
            line = f"RSYNC_RSH={shlex.quote(shlex.join(_ssh(moved.rsync_to)))} {line}"
        line += f" <{shlex.quote(moved.reads)}" if moved.reads else ""
        line += f" >{shlex.quote(moved.writes[0].path)}" if len(moved.writes) == 1 else ""
    if command.stdin is not None:
        text = "[REDACTED]" if command.secret else command.stdin.removesuffix("\n")
        line += f" <<'{_END}'\n{text}\n{_END}"
    return line


def _ssh(host: Host) -> list[str]:
    options = (("-l", host.user), ("-p", host.port), ("-i", host.key))
    return ["ssh", *(str(word) for flag, value in options if value is not None for word in (flag, value))]
