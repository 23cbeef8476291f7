"""What the client or Kaggle says when something cannot be, as one sentence that says what to do. Pure.

The client exits with 0 when a push is refused ("Kernel push error: ..."), and with 1 and a word on stdout or stderr
for all else. The words are those of kaggle 2.2.4 and 2.2.5, and of Kaggle's servers as its users quote them.
"""

import re
from dataclasses import dataclass

from ddpctl.command import Output
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.words import one_line

PUSH_ERROR = re.compile(r"^Kernel push error: (.*)$", re.MULTILINE)
_MISSING, _SLOW = 127, 124


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A pattern in what was said, and what it means."""

    pattern: str
    error: type[DdpctlError]
    sentence: str  # {0} is the pattern's first group


_REFUSALS = (
    Refusal(
        pattern=r"Authentication required to call the Kaggle API|401 Client Error|Unauthenticated|Unauthorized",
        error=UnavailableError,
        sentence="the kaggle client is not logged in: kaggle auth login, or a token in ~/.kaggle/access_token",
    ),
    Refusal(
        pattern=r"Maximum weekly GPU quota(?: of ([\d.]+) hours)? ?reached",
        error=UnavailableError,
        sentence="this week's GPU hours are used up: kaggle quota says when they come back; --device cpu needs none",
    ),
    Refusal(
        pattern=r"Maximum batch \w+ sessions?(?: count)?(?: of (\d+))? ?reached",
        error=UnavailableError,
        sentence="{0} sessions of yours run already, which is the most: wait for one to end, or cancel it on its page",
    ),
    Refusal(
        pattern=r"phone",
        error=UnavailableError,
        sentence="Kaggle gives GPUs and internet only to accounts with a verified phone number: "
        "https://www.kaggle.com/settings",
    ),
    Refusal(
        pattern=r"accelerator|machine.?shape|GPU (?:is )?not (?:allowed|available|supported)",
        error=ConfigError,
        sentence="Kaggle does not give this accelerator: `accelerator: NvidiaTeslaT4` in the target, or --device cpu",
    ),
    Refusal(
        pattern=r"(?:Notebook|Kernel) not found",
        error=NoInputError,
        sentence="Kaggle finds no such notebook of yours: is `owner` the user that the client is logged in as? "
        "A notebook that was made on the website must be saved there once",
    ),
    Refusal(
        pattern=r"409 Client Error|title (?:is )?already in use|^Conflict$",
        error=ConfigError,
        sentence="a notebook of that title is there already: give the run another --name",
    ),
    Refusal(
        pattern=r"429 Client Error|rate limited|Too Many Requests",
        error=UnavailableError,
        sentence="Kaggle has been asked too often: wait a few minutes",
    ),
    Refusal(
        pattern=r"problem on Kaggle's side|5\d\d Server Error|^Internal (?:server )?error",
        error=UnavailableError,
        sentence="Kaggle itself has a fault at present: try again later",
    ),
    Refusal(
        pattern=r"Max retries exceeded|NameResolution|Failed to resolve|Connection refused|ConnectionError|timed out",
        error=UnavailableError,
        sentence="Kaggle cannot be reached from this machine: is there a network, or a proxy to name in HTTPS_PROXY?",
    ),
    Refusal(
        pattern=r"Cannot (?:access|stream logs for) kernel|404 Client Error|resource was not found|^Not found$",
        error=NoInputError,
        sentence="the notebook is not there, or not yours: it may have been deleted on the website",
    ),
    Refusal(
        pattern=r"403 Client Error|Forbidden|You don't have access|was denied",
        error=UnavailableError,
        sentence="Kaggle refuses it (403): the account may lack a verified phone number, a competition's rules may not "
        "be accepted, or the token may not be allowed to",
    ),
    Refusal(
        pattern=r"unrecognized arguments|invalid choice",
        error=UnavailableError,
        sentence="this kaggle client is too old: pip install --upgrade kaggle (2.2 or newer)",
    ),
)


def refusal(output: Output, doing: str) -> DdpctlError | None:
    """Why the client could not do it; None: it could."""
    pushed = PUSH_ERROR.search(output.stdout)
    if output.returncode == 0 and pushed is None:
        return None
    if output.returncode == _MISSING:
        return UnavailableError("no kaggle client here: pip install kaggle, then kaggle auth login")
    if output.returncode == _SLOW:
        return UnavailableError(f"cannot {doing}: the kaggle client gave {output.stderr or 'no answer'}")
    said = pushed[1] if pushed else f"{output.stderr}\n{output.stdout}"
    for known in _REFUSALS:
        if match := re.search(known.pattern, said, re.IGNORECASE | re.MULTILINE):
            group = next(iter(match.groups()), None) or "as many"
            return known.error(f"cannot {doing}: {known.sentence.format(group)}")
    lines = said.strip().splitlines()
    return UnavailableError(f"cannot {doing}: kaggle says: {one_line(lines[0]) if lines else 'nothing'}")
