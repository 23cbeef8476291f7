"""The commands that a target asks for, and their outputs, as values. This module runs nothing itself.

Each operation of a target (a "verb") is a generator. It yields commands that may run in parallel, receives their
outputs in the same order, and finally returns its result. ``executor`` runs a verb; a dry run prints its commands; a
test sends it recorded outputs.
"""

import shlex
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Mode = Literal[
    "capture",  # wait for the command and keep its output
    "stream",  # wait for the command; its stdout goes to ddpctl's stdout
    "background",  # start it in its own session; its stdout and stderr go to the file `output`
    "hold",  # on a host: keep its first line, and let it continue until the verb ends
    "tty",  # wait for it; it controls the terminal: a shell, an attached process
]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another machine, as given to ssh. A field that is None takes its value from ~/.ssh/config."""

    address: str  # a name in ~/.ssh/config, a name in the network, or an IP address
    user: str | None = None
    port: int | None = None
    key: str | None = None  # the path of a private key on this machine

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A part of a file on this machine."""

    path: str
    start: int  # in bytes
    length: int  # in bytes


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Data that a command moves between machines. Its progress is shown while the command runs.

    The ``timeout_s`` of such a command is the longest time without progress. OpenSSH's own client transfers the data
    instead of Fabric, because it is several times as fast.
    """

    num_bytes: int
    num_files: int
    reads: str | None = None  # a file on this machine that is the command's stdin
    writes: tuple[FilePart, ...] = ()  # its stdout goes into these, one after another; their folders are created
    rsync_to: Host | None = None  # if argv runs rsync on this machine: the machine that rsync logs in to


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to run."""

    argv: tuple[str, ...]
    host: Host | None = None  # None: this machine. On another machine, the mode is capture, stream, hold or tty
    env: Mapping[str, str] = field(default_factory=dict)  # added to the environment
    cwd: str | None = None
    stdin: str | None = None  # the text that it reads (capture, hold, and a host's stream); None: nothing
    part: FilePart | None = None  # capture, on a host: what it reads instead of stdin
    transfer: Transfer | None = None
    secret: bool = False  # its stdin is never shown, not even by a dry run
    mode: Mode = "capture"
    output: str | None = None  # background: the file for its output; its folder is created
    stdin_inherited: bool = False  # background: it reads from ddpctl's own stdin instead of nothing
    tether: bool = False  # background: it gets DDP_LIFELINE_FD, which closes when this ddpctl ends
    kills_orphans: bool = False  # tty: after Ctrl-C, the processes that it left behind are killed
    timeout_s: float | None = 30.0  # None: no limit (stream, tty)
    probe: bool = False  # it only reads and changes nothing, so a dry run performs it too
    say: str = ""  # a message for the user before it runs, printed once for consecutive commands
    placeholder: str = ""  # replaces its stdout in a dry run that does not perform it


# The return codes of commands that could not run to their end, as used by shells, timeout(1) and ssh.
NOT_FOUND, TIMED_OUT, UNREACHED = 127, 124, 255
NO_GPU = (NOT_FOUND, 6)  # nvidia-smi is not installed, or finds no device (see its manual page)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The result of a command.

    The return code is NOT_FOUND if the program does not exist, TIMED_OUT if it took too long, and UNREACHED if the host
    could not be reached or was lost. In each case, stderr is a sentence.
    """

    returncode: int
    stdout: str = ""
    stderr: str = ""

    def last_line(self, otherwise: str = "") -> str:
        """Return the last line of stderr. If empty, return ``otherwise`` or, if that is empty too, the exit code."""
        lines = self.stderr.strip().removesuffix("tar: Exiting with failure status due to previous errors").splitlines()
        return lines[-1] if lines else otherwise or f"exit code {self.returncode}"


_END = "END_OF_INPUT"
BRIEF = 200  # characters
SHELL = ("/bin/sh",)  # reads its script from stdin
T = TypeVar("T")
Verb = Generator[tuple[Command, ...], tuple[Output, ...], T]


def sh(host: Host, text: str, *, timeout_s: float = 30.0, secret: bool = False) -> Command:
    """Return the command that runs a script on a host."""
    return Command(argv=SHELL, stdin=text, host=host, timeout_s=timeout_s, secret=secret)


def once(command: Command) -> Verb[Output]:
    """Yield a single command to the executor, and return its output."""
    (output,) = yield (command,)
    return output


def path_word(path: str) -> str:
    """Return a path on a host, quoted for its shell. ``~`` is the home folder of the user who logs in there."""
    return f'"$HOME"{shlex.quote(path[1:])}' if path.startswith("~/") else shlex.quote(path)


def process_line(command: Command) -> str:
    """Return the environment, the folder and the arguments as a user would type them into a shell on that machine."""
    line = " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in command.env.items()), shlex.join(command.argv)]
    )
    return f"cd {shlex.quote(command.cwd)} && {line}" if command.cwd else line


def brief(command: Command) -> str:
    """Return the program and its arguments for an error message, without variables, cut to ``BRIEF`` characters."""
    line = shlex.join(command.argv)
    return line if len(line) <= BRIEF else f"{line[:BRIEF]}..."


def shell_line(command: Command) -> str:
    """Return the command as a user would type it into a shell on this machine."""
    line = process_line(command)
    if command.host:
        tty = ("-t",) if command.mode == "tty" else ()
        line = shlex.join([*_ssh(command.host), *tty, "--", command.host.address, line])
    if command.mode == "background":
        line += f" >{shlex.quote(command.output or '/dev/null')} 2>&1 &"
    if part := command.part:
        line = f"tail -c +{part.start + 1} {shlex.quote(part.path)} | head -c {part.length} | {line}"
    if moved := command.transfer:
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
