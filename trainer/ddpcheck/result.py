"""What a check hands back: lines for a person as they come, and at its end one JSON object for ddpctl."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddpwire.exits import Exit
from ddpwire.log_record import pack_result


def say(line: str = "") -> None:
    """Print a line now. For rank 0."""
    print(line, flush=True)


def finish(values: Mapping[str, Any], *, check: str, findings: Sequence[str], record: bool) -> None:
    """End a check on rank 0: print its findings, and with ``record`` its result as lines for ddpctl.

    The result is ``values`` with ``check``, ``findings`` (a sentence for each thing that is bad) and ``code``: what
    ddpctl exits with. The rank itself exits with 0, for the run has done what it was asked to do.
    """
    for finding in findings:
        say(finding)
    if record:
        code = int(Exit.UNAVAILABLE if findings else Exit.OK)
        for line in pack_result({"check": check, "code": code, "findings": [*findings], **values}):
            say(line)
