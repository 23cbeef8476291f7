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
        env = json.loads(rest.pop(names.JOB_ENV, "{}"))
    except (ValueError, RecursionError):
        env = None
    if not isinstance(env, dict) or not all(map(_can_be_set, env, env.values())):
        raise ValueError(f"{names.JOB_ENV} is not a JSON object of names and their text")
    return rest | env


def _can_be_set(name: str, value: object) -> bool:
    try:
        os.fsencode(f"{name}{value}")
    except UnicodeEncodeError:
        return False
    return bool(name) and "=" not in name and isinstance(value, str) and "\0" not in f"{name}{value}"
