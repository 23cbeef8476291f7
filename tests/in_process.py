"""ddpctl called in this process, for tests in which a process of its own is not the point: it takes 0.3 s less."""

import contextlib
import functools
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a call ended, in the words of ``subprocess.CompletedProcess``."""

    returncode: int
    stdout: str
    stderr: str


@functools.cache
def command() -> Any:
    """The program, built from its functions once: that takes longer than most calls."""
    from ddpctl.main import app

    return get_command(app)


def verbs() -> dict[str, Any]:
    """Each verb as a command of Typer."""
    return {name: command().get_command(None, name) for name in command().commands}


def ddpctl(*arguments: str, cwd: Path | None = None, **env: str) -> Ended:
    """Call ddpctl with these arguments; raise what it does not handle itself.

    What its child processes write to their own stdout is not in the result.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.chdir(cwd or Path.cwd()), CliRunner().isolation(env=env) as (stdout, stderr, _):
            try:
                command().main(args=arguments, prog_name="ddpctl")
            except SystemExit as end:
                code = end.code
            sys.stdout.flush()
            sys.stderr.flush()
            written = [stream.getvalue().decode() for stream in (stdout, stderr)]
    finally:
        signal.signal(signal.SIGINT, handler)  # ddpctl's own ends the process
    assert isinstance(code, int), code
    return Ended(returncode=code, stdout=written[0], stderr=written[1])
