"""Runs a rehearsal: gives the project to ``python -m ddprun.rehearsal``, and returns the facts of its runs."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpctl.command import Command, once
from ddpctl.errors import ConfigError, NoInputError, UnavailableError, writing
from ddpctl.files.images import human_size
from ddpctl.files.project_files import LIST_ARGV, MAX_BYTES
from ddpctl.job.launch_plan import CHECK_PYTHON, Request, program, script_of
from ddpctl.operations.launcher import AppContext
from ddpwire.run_files import parse_json

TIME_LIMIT_S = 3600.0
END_S, POLL_S = 10.0, 0.1  # for processes that are being killed
DEFAULT_GRACE_S = 30.0  # ddprun's


def rehearse(
    context: AppContext, request: Request, *, steps: int, shared: bool, links: Sequence[str], scenarios: Sequence[str]
) -> list[dict[str, Any]]:
    """Run the scenarios, with progress on stderr, and return the facts of each run. Raises DdpctlError.

    Nothing is left, not even after Ctrl-C.
    """
    job, cwd, python = request.job, Path.cwd(), getattr(request.options, "python", "") or sys.executable
    context.executor.perform(once(Command(argv=(python, "-c", CHECK_PYTHON)))).check(f"{python} cannot run ranks")
    command, script = [*program(job.command)], script_of(job.command)
    for name in filter(None, (script, *links)):
        if not (cwd / name).exists():
            raise NoInputError(f"{name}: no such file in {cwd}")
    if script and Path(script).is_relative_to(cwd):
        command[0] = str(Path(script).relative_to(cwd))  # that of the copy
    plan: dict[str, Any] = {"project": str(cwd), "files": _files(context, links), "links": [*links], "command": command}
    plan |= {"nodes": job.max_nodes, "ranks": job.local_world_size, "grace_s": job.grace or DEFAULT_GRACE_S}
    plan |= {"steps": steps, "shared": shared, "scenarios": [*scenarios]}
    with writing(tempfile.gettempdir()):
        work = Path(tempfile.mkdtemp(prefix="ddpctl-rehearse-"))
    try:
        with writing(work):
            (work / "plan.json").write_text(json.dumps({"work": str(work), **plan}))
        argv = (python, "-P", "-m", "ddprun.rehearsal", str(work / "plan.json"))
        env = {**job.env, "TMPDIR": str(work)}  # torch makes a folder when it is imported
        done = context.executor.perform(once(Command(argv=argv, env=env, mode="stream", timeout_s=TIME_LIMIT_S)))
        try:
            runs: Any = parse_json((work / "facts.json").read_bytes())
        except (OSError, ValueError):
            raise UnavailableError(f"the rehearsal has no result: {done.last_line()}") from None
        return list(runs)
    finally:
        deadline = time.monotonic() + END_S
        while work.exists() and time.monotonic() < deadline:  # after Ctrl-C, ranks are about to end
            shutil.rmtree(work, ignore_errors=True)
            time.sleep(POLL_S * work.exists())


def _files(context: AppContext, links: Sequence[str]) -> list[str]:
    """Return the project's files that each node gets. Raises ConfigError if they are too large."""
    listing = context.executor.perform(once(Command(argv=LIST_ARGV, cwd=str(Path.cwd()))))
    listing.check("cannot list the project's files")
    project: Any = parse_json(listing.stdout)
    is_linked = [name for name in project["sizes"] if any(Path(name).is_relative_to(link) for link in links)]
    sizes = {name: size for name, size in project["sizes"].items() if name not in {*is_linked}}
    if (total := sum(sizes.values())) > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name]).partition("/")[0]
        too_large = f"the project has {human_size(total)}; each node gets a copy of at most {human_size(MAX_BYTES)}"
        raise ConfigError(too_large, hint=f"name data that is only read, such as --link {largest}")
    for line in project["left_out"]:
        if not any(link in line for link in links):
            context.emit(f"rehearse: not copied for the nodes: {line}; --link PATH shares what is only read")
    return list(sizes)
