"""Passes the variables of a job's ``env`` to a node's ddprun, through shells and container engines.

Shells use some variables themselves, such as UID, PS4 and PATH. A batch script has variables of its own, too. So the
job's variables are packed into one variable. Before it does anything else, ddprun unpacks this variable.
"""

import json
import os
from collections.abc import Mapping

from ddpwire import names


def pack(env: Mapping[str, str]) -> dict[str, str]:
    """Return a dict with one variable that contains ``env`` as a line of ASCII, or {} if ``env`` is empty."""
    return {names.JOB_ENV: json.dumps(dict(env))} if env else {}


def unpack(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables that were packed into it. Raises ValueError."""
    rest = dict(environ)
    try:
        env: dict[str, str] = json.loads(rest.pop(names.JOB_ENV, "{}"))
        for name, value in env.items():
            text = os.fsencode(f"{name}{value}")  # raises UnicodeEncodeError, which is a ValueError
            if not name or "=" in name or not isinstance(value, str) or b"\0" in text:
                raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{names.JOB_ENV} is not a JSON object of names and their text") from None
    return rest | env
