"""The output of a check: lines for a person as they come, and at the end one JSON object for ddpctl."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddpwire.exits import Exit
from ddpwire.log_record import pack_result


def say(line: str = "") -> None:
    """Print a line immediately. Only rank 0 calls it."""
    print(line, flush=True)


def finish(values: Mapping[str, Any], *, check: str, findings: Sequence[str], record: bool) -> None:
    """End a check on rank 0: print its findings and, with ``record``, its result as lines for ddpctl.

    The result is ``values`` with ``check``, ``findings`` (a sentence for each bad result) and ``code``, which becomes
    ddpctl's exit code. The rank itself exits with 0, because the run has done what it was asked to do.
    """
    for finding in findings:
        say(finding)
    if record:
        code = int(Exit.UNAVAILABLE if findings else Exit.OK)
        for line in pack_result({"check": check, "code": code, "findings": [*findings], **values}):
            say(line)
