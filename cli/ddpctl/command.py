"""The commands that a target runs, and their outputs, as values.

Each operation of a target (a "verb") is a generator. It yields commands that may run in parallel, receives their
outputs in the same order, and finally returns its result. The module ``executor`` runs the commands.
"""

import re
import shlex
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

from ddpctl.environment import READER, UNSET
from ddpctl.errors import DdpctlError, UnavailableError
from ddpctl.text import cut
from ddpwire.machine import MAX_PORT

_HOST = re.compile(r"(?!-)(?:(?P<user>[\w.-]+)@)?(?P<address>\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(?P<port>[0-9]{1,5}))?")
Mode = Literal[
    "capture",  # wait for the command and keep its output
    "stream",  # wait for the command; its stdout goes to ddpctl's stdout
    "background",  # start it in its own session; its stdout and stderr go to the file `output`
    "hold",  # on a host: keep its first line, and let it continue until the verb ends
    "tty",  # wait for it; it controls the terminal: a shell, an attached process
]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Another machine. If a field is None, its value is taken from ~/.ssh/config."""

    address: str  # a name in ~/.ssh/config, a name in the network, or an IP address
    user: str | None = None
    port: int | None = None
    key: str | None = None  # the path of a private key on this machine

    def __str__(self) -> str:
        return self.address

    @classmethod
    def from_text(cls, text: str) -> "Host":
        """Parse a host such as ``alice@box1:2222``. Raises ValueError."""
        match = _HOST.fullmatch(text)
        if not match or not 0 < int(match["port"] or 22) <= MAX_PORT:
            raise ValueError("expected [USER@]ADDRESS[:PORT], such as alice@box1:2222")
        port = int(match["port"]) if match["port"] else None
        return cls(address=match["address"].strip("[]"), user=match["user"], port=port)


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A part of a file on this machine."""

    path: str
    start: int  # in bytes
    length: int  # in bytes


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Data that a command moves between machines. The progress is shown while the command runs.

    The ``timeout_s`` of such a command is the longest time without progress. OpenSSH's client transfers the data,
    because it is several times as fast as Fabric.
    """

    num_bytes: int
    num_files: int
    reads: FilePart | None = None  # stdin is this part of a file, up to the end of the file
    writes: tuple[FilePart, ...] = ()  # stdout is written to these parts in order; their folders are created
    rsync_to: Host | None = None  # if argv runs rsync on this machine: the machine that rsync logs in to


@dataclass(frozen=True, kw_only=True)
class Command:
    """A process to run."""

    argv: tuple[str, ...]
    # A function of this process to call instead of a program. It reads or writes files of this machine.
    call: Callable[[], Any] | None = None
    host: Host | None = None  # None: this machine. On another machine, the mode is capture, stream, hold or tty
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables, in addition to those of ddpctl
    cwd: str | None = None
    # The text of its stdin (capture, hold, stream); None: empty. It may hold secrets.
    stdin: str | None = field(default=None, repr=False)
    transfer: Transfer | None = None
    secret: bool = False  # its stdin is never shown, not even by a dry run
    mode: Mode = "capture"
    output: str | None = None  # background: the file for its output; its folder is created
    stdin_inherited: bool = False  # background: its stdin is ddpctl's stdin, not /dev/null
    tether: bool = False  # background: it gets DDP_LIFELINE_FD, which closes when this ddpctl ends
    kills_orphans: bool = False  # tty: after Ctrl-C, processes that the command left are killed
    timeout_s: float | None = 30.0  # None: no limit (stream, tty)
    starts: bool = False  # it may start the run, so the run may exist if its reply is lost
    probe: bool = False  # it changes nothing, so a dry run runs it too
    say: str = ""  # a message to print before the command, unless it is the same as the previous message
    placeholder: str = ""  # text that stands for its stdout if a dry run does not run it


# The return codes of commands that could not run to their end, as used by shells, timeout(1) and ssh.
NOT_FOUND, TIMED_OUT, UNREACHED = 127, 124, 255
NO_GPU = (NOT_FOUND, 6)  # nvidia-smi is not installed, or finds no device (see its manual page)


@dataclass(frozen=True, kw_only=True)
class Output:
    """The result of a command.

    The return code is NOT_FOUND if the program does not exist, TIMED_OUT if it took too long, and UNREACHED if the host
    could not be reached or was lost. In each of these cases, stderr is one sentence.
    """

    returncode: int
    stdout: str = ""
    stderr: str = ""
    value: Any = None  # what ``Command.call`` has returned
    at: float = field(default_factory=time.time, compare=False)  # when it arrived, in seconds since the epoch

    def last_line(self, otherwise: str = "") -> str:
        """Return the last line of stderr. If stderr is empty, return ``otherwise``. If both are empty, return the exit
        code.
        """
        lines = self.stderr.strip().removesuffix("tar: Exiting with failure status due to previous errors").splitlines()
        return lines[-1] if lines else otherwise or f"exit code {self.returncode}"

    def check(self, action: str, wrong: type[DdpctlError] = UnavailableError) -> None:
        """Raise ``wrong`` if the command failed. The message is ``action`` and ``last_line``."""
        if self.returncode:
            raise wrong(f"{action}: {self.last_line()}")


_END = "END_OF_INPUT"
BRIEF = 200  # characters
SHELL = ("/bin/sh",)  # reads its script from stdin
T = TypeVar("T")
Verb = Generator[tuple[Command, ...], tuple[Output, ...], T]


def sh(host: Host, text: str, *, timeout_s: float | None = 30.0, **rest: Any) -> Command:
    """Return the command that runs a script on a host."""
    return Command(argv=SHELL, stdin=text, host=host, timeout_s=timeout_s, **rest)


def call(function: Callable[..., Any], *args: Any, **rest: Any) -> Command:
    """Return the command that calls a function of this process."""
    return Command(argv=(f"{function.__module__}.{function.__qualname__}",), call=partial(function, *args), **rest)


def once(command: Command) -> Verb[Output]:
    """Run a single command, and return its output."""
    (output,) = yield (command,)
    return output


def write_file(path: str, text: str, *, host: Host | None = None, secret: bool = False) -> Command:
    """Return the command that writes a file, which only its owner may read, and creates its folder."""
    script = 'mkdir -p "${1%/*}" && umask 077 && cat >"$1"'
    return Command(argv=("sh", "-c", script, "ddpctl", path), host=host, stdin=text, secret=secret)


def path_word(path: str) -> str:
    """Return a path on a host, quoted for the host's shell. ``~/`` means the home folder of the user on the host."""
    return f'"$HOME"{shlex.quote(path[1:])}' if path.startswith("~/") else shlex.quote(path)


def process_line(command: Command) -> str:
    """Return the command, with its folder and its variables, as a line for a shell on the command's machine."""
    line = " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in command.env.items()), shlex.join(command.argv)]
    )
    return f"cd {shlex.quote(command.cwd)} && {line}" if command.cwd else line


def remote_line(command: Command) -> str:
    """Return the command as a line for any shell of its host, with the environment of a tool."""
    if command.argv[0] == READER:
        return process_line(command)
    line = shlex.join(["exec", "env", *(f"{name}={value}" for name, value in command.env.items()), *command.argv])
    line = f"cd {shlex.quote(command.cwd)} && {line}" if command.cwd else line
    return shlex.join(["/bin/sh", "-c", f"{UNSET}{line}"])


def brief(command: Command) -> str:
    """Return the command's arguments as text for an error message, cut to ``BRIEF`` characters."""
    return cut(shlex.join(command.argv), BRIEF, plain=True)


def shell_line(command: Command) -> str:
    """Return the command as a line for a shell on this machine."""
    line = process_line(command)
    if command.host:
        tty = ("-t",) if command.mode == "tty" else ()
        line = shlex.join([*_ssh(command.host), *tty, "--", command.host.address, line])
    if command.mode == "background":
        line += f" >{shlex.quote(command.output or '/dev/null')} 2>&1 &"
    if moved := command.transfer:
        if moved.rsync_to:
            line = f"RSYNC_RSH={shlex.quote(shlex.join(_ssh(moved.rsync_to)))} {line}"
        line += f" <{shlex.quote(moved.reads.path)}" if moved.reads else ""
        line += f" >{shlex.quote(moved.writes[0].path)}" if len(moved.writes) == 1 else ""
    if command.stdin is not None:
        text = "[REDACTED]" if command.secret else command.stdin.removesuffix("\n")
        line += f" <<'{_END}'\n{text}\n{_END}"
    return line


def _ssh(host: Host) -> list[str]:
    options = (("-l", host.user), ("-p", host.port), ("-i", host.key))
    return ["ssh", *(str(word) for flag, value in options if value is not None for word in (flag, value))]
