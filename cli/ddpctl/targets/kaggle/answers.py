"""What the client's answers say of a run: Kaggle knows how its session fares, the log how the ranks ended. Pure."""

import json
import re
from dataclasses import dataclass

from ddpctl.errors import DdpctlError
from ddpctl.run import RunStatus, State
from ddpwire.exits import Exit

# kagglesdk's KernelWorkerStatus, without its underscores; what older clients print differs in that and in case.
STATES: dict[str, State] = {
    "queued": "pending",
    "newscript": "pending",
    "running": "training",
    "complete": "succeeded",
    "error": "failed",
    "cancelrequested": "stopping",
    "cancelacknowledged": "stopped",
}
_STATUS = re.compile(r'has status "(?:\w+\.)?(\w+)"')
_FAILURE = re.compile(r'^Failure message: "(.*)"$', re.MULTILINE | re.DOTALL)
_PUSHED = re.compile(r"^Kernel version (\d+) successfully pushed\. +Please check progress at (\S+)$", re.MULTILINE)
_INVALID = re.compile(r"^The following are not valid (.+?) and could not be added to the kernel: (.*)$", re.MULTILINE)
_USER = re.compile(r"^- username: (\S+)$", re.MULTILINE)
_OUTCOME = re.compile(r"^ddpctl outcome (\{.*\})$", re.MULTILINE)
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
# What Kaggle says of a session that it ended itself.
_FAILURES = (
    (r"memory", "the session ran out of memory: a smaller batch, or --input loader"),
    (
        r"time limit|timed? ?out|exceeded.*(?:time|hours|duration)",
        "the session's time was over before the notebook ended",
    ),
    (r"disk|space", "the session's disk is full: its working folder holds 20 GB"),
    (r"requested cancel|cancell?ed", "it was cancelled on the website"),
)


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What came of a push."""

    version: str
    url: str
    without: tuple[str, ...]  # what was asked for and is not among the inputs, a line each


def read_user(text: str) -> str | None:
    """Whom ``kaggle config view`` names; None: nobody is logged in."""
    match = _USER.search(text)
    return match[1] if match and match[1] != "None" else None


def read_push(text: str) -> Pushed:
    """What ``kaggle kernels push`` printed. Raises DdpctlError."""
    match = _PUSHED.search(text)
    if match is None:
        raise DdpctlError(f"the kaggle client pushed, and printed what ddpctl cannot read: {text.strip()[:200]!r}")
    without = tuple(
        f"not among its inputs, since Kaggle knows no such {what}: {names}" for what, names in _INVALID.findall(text)
    )
    return Pushed(version=match[1], url=match[2], without=without)


def read_status(run: str, text: str) -> RunStatus:
    """What ``kaggle kernels status`` printed."""
    match = _STATUS.search(text)
    word = match[1] if match else ""
    state = STATES.get(word.replace("_", "").lower(), "unknown")
    failure = _FAILURE.search(text)
    message = _explained(failure[1].strip()) if failure else _MESSAGES.get(state, f"Kaggle says: {text.strip()[:120]}")
    code = {"succeeded": Exit.OK, "failed": Exit.SCRIPT, "stopped": Exit.SAVED_TERM}.get(state)
    return RunStatus(run=run, state=state, message=message, code=None if code is None else int(code))


_MESSAGES: dict[State, str] = {
    "pending": "Kaggle has it in its queue",
    "training": "its session runs",
    "succeeded": "the notebook ran to its end",
    "failed": "the notebook failed",
    "stopping": "it is being cancelled",
    "stopped": "it was cancelled on the website",
}


def _explained(failure: str) -> str:
    words = " ".join(failure.split())
    for pattern, sentence in _FAILURES:
        if re.search(pattern, words, re.IGNORECASE):
            return f"{sentence} (Kaggle: {words})"
    return f"Kaggle: {words}"


def with_log(found: RunStatus, log: str) -> RunStatus:
    """The status of a session that has ended, with what its log says of the ranks."""
    text = plain(log)
    outcomes = _OUTCOME.findall(text)
    if outcomes:
        said = json.loads(outcomes[-1])
        state: State = "succeeded" if said["code"] == 0 else "stopped" if said["cause"] == "stopped" else "failed"
        if found.state == "stopped":
            return found
        return RunStatus(run=found.run, state=state, message=said["message"], code=int(said["code"]))
    raised = _RAISED.findall(text)
    if found.state == "failed" and raised and found.message == _MESSAGES["failed"]:
        return RunStatus(run=found.run, state="failed", message=f"the notebook failed: {raised[-1]}", code=found.code)
    return found


def plain(log: str) -> str:
    """A session's log as text: the client prints it as Kaggle keeps it, a JSON list of pieces."""
    try:
        pieces = json.loads(log)
        return "".join(str(piece.get("data", "")) for piece in pieces)
    except (ValueError, TypeError, AttributeError):
        return log
