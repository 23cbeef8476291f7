"""Runs a rehearsal: gives the project to ``python -m ddprun.rehearsal``, and returns the facts of its runs."""

import fcntl
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
DEFAULT_GRACE_S, DEFAULT_IDLE_S = 30.0, 120.0
PREFIX, PLAN = "ddpctl-rehearse-", "plan.json"


def rehearse(
    context: AppContext, request: Request, *, steps: int, shared: bool, links: Sequence[str], scenarios: Sequence[str]
) -> tuple[list[dict[str, Any]], KeyboardInterrupt | None]:
    """Run the scenarios, with progress on stderr, and return the facts of each run. Raises DdpctlError.

    After Ctrl-C, return the facts of the scenarios that were run to their end, and the exception. Nothing is left.
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
    plan |= {
        "nodes": job.max_nodes,
        "gpus": job.max_gpus,
        "ranks": job.local_world_size,
        "grace_s": job.grace or DEFAULT_GRACE_S,
    }
    plan |= {"steps": steps, "shared": shared, "scenarios": [*scenarios]}
    plan["idle_s"] = DEFAULT_IDLE_S if job.hang_timeout is None else job.hang_timeout or math.inf
    with _work_folder(plan) as work:
        argv = (python, "-P", "-m", "ddprun.rehearsal", str(work / PLAN))
        env = {**job.env, "TMPDIR": str(work)}  # torch makes a folder when it is imported
        runs: Any = []
        interruption, end = None, ""
        try:
            run = Command(argv=argv, env=env, mode="stream", timeout_s=TIME_LIMIT_S)
            end = context.executor.perform(once(run)).last_line()
        except KeyboardInterrupt as error:
            interruption = error
        with suppress(OSError, ValueError):
            runs = parse_json((work / "facts.json").read_bytes())
        if not runs and not interruption:
            raise UnavailableError(f"the rehearsal has no result: {end}")
        return runs, interruption


@contextmanager
def _work_folder(plan: Mapping[str, Any]) -> Iterator[Path]:
    """Make a temporary folder with the plan in it, and remove it at the end, with those of processes that were killed.

    The lock of a plan shows that its owner is alive.
    """
    with writing(tempfile.gettempdir()), ExitStack() as stack:
        work = Path(tempfile.mkdtemp(prefix=PREFIX))
        stack.callback(_remove, work)
        own = stack.enter_context((work / PLAN).open("w"))
        fcntl.flock(own, fcntl.LOCK_EX)
        own.write(json.dumps({"work": str(work), **plan}))
        own.flush()
        kept = stack.pop_all()
    for path in work.parent.glob(f"{PREFIX}*/{PLAN}"):
        with suppress(OSError), path.open() as abandoned:
            fcntl.flock(abandoned, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if abandoned.read(1):  # else its owner is about to lock it
                shutil.rmtree(path.parent, ignore_errors=True)
    with kept:
        yield work


def _remove(work: Path) -> None:
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
