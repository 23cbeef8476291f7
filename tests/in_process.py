"""ddpctl called in this process, for tests in which a process of its own is not the point: it takes 0.3 s less."""

import contextlib
import functools
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from typer.main import get_command


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


def ddpctl(*words: str, cwd: Path | None = None, **env: str) -> Ended:
    """Call ddpctl with these arguments; raise what it does not handle itself.

    What its child processes write to their own stdout is not in the result.
    """
    handler = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.chdir(cwd or Path.cwd()):
            result = CliRunner().invoke(command(), words, env=env, prog_name="ddpctl")
    finally:
        signal.signal(signal.SIGINT, handler)  # ddpctl's own ends the process
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ended(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)
