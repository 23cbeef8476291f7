"""The variables of a job's ``env`` on their way to a node's ddprun, through shells and container engines.

A shell keeps names for itself (UID, PS4, PATH while it looks for a program), and a script has variables of its own. So
those of a job travel in one variable, which ddprun replaces by them before it does anything else.
"""

import json
import os
from collections.abc import Mapping

from ddpwire import names


def pack(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that carries ``env``, in ASCII without line ends; none if there is nothing to carry."""
    return {names.JOB_ENV: json.dumps(dict(env))} if env else {}


def unpack(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables that it carries. Raises ValueError."""
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
