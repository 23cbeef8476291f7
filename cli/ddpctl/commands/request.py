"""From flags, file and record to a request: what a launch or a render is about."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpctl import config, targets
from ddpctl.desk import Request
from ddpctl.errors import UsageError
from ddpctl.fields import fields_of
from ddpctl.run import Run
from ddpctl.spec import NAME_PATTERN


def overrides(
    nodes: str | None,
    gpus: str | None,
    device: str | None,
    env: list[str] | None,
    port: str | None,
    image: str | None,
    program: list[str] | None,
) -> dict[str, Any]:
    """The flags that are fields of a job; None: not given."""
    variables = {}
    for pair in env or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--env: '{key}' has no value: write --env {key}=VALUE")
        variables[key] = value
    return {
        "nodes": nodes,
        "gpus": _number("--gpus", gpus),
        "device": device,
        "port": _number("--port", port),
        "image": image,
        "env": variables or None,
        "command": tuple(program) if program else None,
    }


def _number(flag: str, text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise UsageError(f"{flag}: '{text}' is no whole number") from None


def of_flags(
    flags: dict[str, Any],
    file: Path | None,
    profile: str | None,
    target: str | None,
    name: str | None,
    workload: str | None,
) -> Request:
    """File and flags as one request."""
    _check_name(name)
    found = config.find_file(file, Path.cwd())
    kind, why = targets.default_kind(os.environ)
    settings = config.load(
        file=found,
        profile=profile,
        target=target,
        overrides=flags,
        kinds=targets.kinds(),
        workload=workload,
        default_kind=kind,
        default_why=why,
    )
    return Request(
        job=settings.job,
        target=settings.target,
        kind=settings.kind,
        options=settings.options,
        why=settings.why,
        cwd=str(Path.cwd()),
        name=name,
    )


def with_array(request: Request, array: str | None) -> Request:
    """The request as an array of jobs, where the target has such."""
    if array is None:
        return request
    if (field := fields_of(targets.options_type(request.kind)).get("array")) is None:
        raise UsageError(f"--array: the target {request.target} ({request.kind}) has no arrays of jobs: Slurm has")
    try:
        for check in field.checks:
            check(array)
    except ValueError as error:
        raise UsageError(f"--array: '{array}' is not allowed: {error}") from None
    return replace(request, options=replace(request.options, array=array))


def resumed(flags: dict[str, Any], run: Run, name: str | None) -> Request:
    """A run's record, with flags laid over its job, as a request that goes on from its checkpoints."""
    _check_name(name)
    given = {key: value for key, value in flags.items() if value is not None}
    env = {**run.job.env, **given.pop("env", {})}
    settings = config.load(
        file=None,
        profile=None,
        target="local",  # the job is what is checked; the run keeps its own target
        overrides={**vars(run.job), **given, "env": env},
        kinds=targets.kinds(),
    )
    return Request(
        job=settings.job,
        target=run.target,
        kind=run.kind,
        options=targets.fill_options(run.kind, run.options),
        why=f"resumes {run.name}",
        cwd=run.cwd,
        name=name,
        resumes=run,
    )


def _check_name(name: str | None) -> None:
    if name is not None and not NAME_PATTERN.fullmatch(name):
        raise UsageError(f"--name: '{name}' is no name: lower-case letters, digits and '-', a letter first, at most 40")
