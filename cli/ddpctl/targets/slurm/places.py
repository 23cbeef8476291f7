"""Where a run's folders and logs are on the cluster, and what its handle says. Asks one question: your home."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath

from ddpctl.command import Command, Host, Verb
from ddpctl.errors import UnavailableError
from ddpctl.plan import Plan
from ddpctl.run import Run
from ddpctl.targets import LogQuery
from ddpctl.targets.slurm.options import SlurmOptions
from ddpwire import folder

RUNS = ".local/state/ddpctl/runs"


def host_of(options: SlurmOptions) -> Host | None:
    """The login node; None: this machine."""
    if options.login is None:
        return None
    user, _, address = options.login.rpartition("@")
    return Host(address=address, user=user or None)


def on_the_cluster(plan: Plan, options: SlurmOptions, host: Host | None) -> Verb[Plan]:
    """The plan with the cluster's folders in place of this machine's."""
    workdir, runs = options.workdir, options.runs
    if host is not None and not (workdir and runs):
        (home,) = yield (Command(argv=("printenv", "HOME"), host=host, probe=True),)
        if home.returncode:
            lines = home.stderr.strip().splitlines()
            raise UnavailableError(f"{options.login}: {lines[-1] if lines else 'no HOME there'}")
        workdir = workdir or home.stdout.strip()
        runs = runs or str(PurePath(home.stdout.strip()) / RUNS)
    if workdir:
        plan = replace(plan, cwd=workdir)
    if runs:
        # A run that goes on from another has that one's checkpoints.
        of = PurePath(plan.checkpoint_dir).parent.name if plan.checkpoint_dir else plan.run
        run_dir = PurePath(runs) / plan.run
        checkpoints = PurePath(plan.checkpoint_dir)
        if not checkpoints.is_relative_to(runs):
            checkpoints = PurePath(runs) / of / folder.CHECKPOINTS
        plan = replace(plan, run_dir=str(run_dir), checkpoint_dir=str(checkpoints))
    return plan


def expand(array: str) -> tuple[str, ...]:
    """The indices of a job array: ``0-6:3,9%2`` is 0, 3, 6, 9."""

    def numbers() -> Iterator[int]:
        for part in array.split("%")[0].split(","):
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            yield from range(int(first), int(last or first) + 1, int(step or 1))

    return tuple(str(number) for number in dict.fromkeys(numbers()))


def job_of(run: Run) -> str:
    """The job's number, or ``@PID:JOB`` of a script inside of an allocation; empty: it was never sent."""
    pid, job = run.handle.get("pid"), str(run.handle.get("job", ""))
    return f"@{pid}:{job}" if pid else job


def tasks_of(run: Run) -> tuple[str, ...]:
    """The indices of an array; empty: it is none."""
    return tuple(run.handle.get("tasks", ()))


def folders(run: Run) -> tuple[str, ...]:
    """The folders of a run on the cluster: one, or one for each of an array."""
    place = str(run.handle.get("dir", run.folder))
    return tuple(f"{place}/task-{task}" for task in tasks_of(run)) or (place,)


def workdir(run: Run) -> str:
    """The project's folder on the cluster."""
    return str(run.handle.get("workdir", run.cwd))


def logs(run: Run, query: LogQuery) -> tuple[str, ...]:
    """The files that a query asks for, each after what stands before its lines."""
    place, tasks = str(run.handle.get("dir", run.folder)), tasks_of(run)
    if not query.nodes and not query.ranks:
        if not tasks:
            return ("", f"{place}/job.log")
        return tuple(word for task in tasks for word in (f"[task {task}] ", f"{place}/job-{task}.log"))
    words: list[str] = []
    for path, before in zip(folders(run), [f"[task {task}] " for task in tasks] or [""], strict=True):
        if not query.ranks:
            for node in query.nodes:
                words += [before, f"{path}/{folder.node_name(node)}/{folder.NODE_LOG}"]
        for rank in query.ranks:
            node = rank // run.job.gpus
            if not query.nodes or node in query.nodes:
                file = f"{path}/{folder.node_name(node)}/{folder.rank_log(rank)}"
                words += [f"{before}[node{node} rank{rank}] ", file]
    return tuple(words)
