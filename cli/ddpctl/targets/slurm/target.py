"""The verbs of the target slurm: what is asked of the login node, in which order.

A run is one job, or an array of them; inside of an allocation (salloc) it is a script that uses its nodes.
"""

import re
import shlex
from dataclasses import replace
from pathlib import PurePath

from ddpctl import footprint
from ddpctl.command import Command, Output, Verb
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.footprint import Footprint
from ddpctl.look import TIMEOUT_S, Look, Seen, read, script
from ddpctl.plan import Plan, counted, script_of
from ddpctl.run import Run, RunStatus
from ddpctl.script import find_script
from ddpctl.secrets import read_secrets
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.slurm import looks, places, questions, sending
from ddpctl.targets.slurm.answers import node_files, read_answers, status_of, together
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.runtimes import beside
from ddpctl.targets.slurm.script import render_script
from ddpwire.exits import Exit
from ddpwire.folder import node_name

YOUNG_S = 20.0  # how long Slurm may not know a job that it has just taken
KILL_WAIT_S = 60.0  # its own KillWait is 30 s at most sites
STOP_MARGIN_S = 15.0


class SlurmTarget:
    """Jobs of a Slurm cluster."""

    def __init__(self, options: SlurmOptions) -> None:
        self.options = options
        self._host = places.host_of(options)

    def render(self, plan: Plan) -> str:
        """A script for sbatch."""
        self._check(plan)
        return render_script(plan, self.options)

    def expect(self, plan: Plan) -> Verb[None]:
        """The script is in the folder that sbatch is called in; one with a full path may be in the image, or there."""
        path = PurePath(script_of(plan.job.command) or "")
        in_image = self.options.runtime != "none" and path.is_absolute()
        if self._host is None and not in_image:
            yield from find_script(plan)

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Look where the run may be, then give the script to sbatch; inside of an allocation, to bash."""
        del attached  # Slurm's job goes on without this ddpctl in any case
        self._check(plan)
        secrets = yield from read_secrets(plan.job)
        records = str(PurePath(plan.run_dir).parent)
        plan = yield from places.on_the_cluster(plan, self.options, self._host)
        yield from looks.find_script(plan, self._host)
        if self._host is None and not self.options.array:
            (inside,) = yield (Command(argv=("printenv", "SLURM_JOB_ID"), probe=True),)
            if inside.returncode == 0:
                return (yield from sending.into_allocation(plan, self.options, secrets, inside.stdout.strip()))
        return (yield from sending.to_sbatch(plan, self.options, self._host, secrets, records))

    def _check(self, plan: Plan) -> None:
        if self.options.runtime != "none" and re.search("[,:\n]", plan.cwd):
            raise ConfigError(f"a container cannot have the folder {plan.cwd!r}: no comma, colon or line's end")

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Ask Slurm, and every node's folder."""
        files = tuple(path for run in runs for place in places.folders(run) for path in node_files(place, _nodes(run)))
        jobs = ",".join(dict.fromkeys(places.job_of(run) for run in runs if places.job_of(run)))
        (said,) = yield (self._ask(questions.ASK, jobs, *files),)
        if said.returncode:
            words = _last_line(said, "no answer")
            return tuple(RunStatus(run=run.name, state="unknown", message=f"cannot be asked: {words}") for run in runs)
        answers = read_answers(said.stdout)
        found = []
        for run in runs:
            young = now - run.created < YOUNG_S
            number, tasks = places.job_of(run), places.tasks_of(run)
            mine = [job for job in answers.jobs if job.id == number]
            states = []
            for place, task in zip(places.folders(run), tasks or (None,), strict=True):
                job = next((job for job in mine if job.task == task), None)
                states.append(status_of(run, place, job, answers, young=young))
            found.append(together(run, tuple(states), tasks) if tasks else states[0])
        return tuple(found)

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print what the job said, or some nodes or ranks; while it waits, why."""
        files = places.logs(run, query)
        text = questions.FOLLOW if query.follow else questions.PRINT
        tail = "+1" if query.tail is None else str(query.tail)
        (done,) = yield (self._ask(text, places.job_of(run), tail, *files, stream=True),)
        if done.returncode == Exit.NO_INPUT:
            last = run.job.max_nodes * run.job.gpus - 1
            raise NoInputError(
                f"{run.name} has no such log yet: its nodes are 0 to {run.job.max_nodes - 1}, its ranks 0 to {last}"
            )

    def look(self, run: Run, look: Look) -> Verb[tuple[Seen, ...]]:
        """Ask the login node, which has the nodes' folders and reaches their endpoints."""
        if tasks := places.tasks_of(run):
            raise ConfigError(f"{run.name} is an array of {len(tasks)} trainings: a look shows one, not many")
        nodes = range(_nodes(run))
        (folder,) = places.folders(run)
        placed = questions.PLACED.format(job=shlex.quote(places.job_of(run)))
        text = script(look, [shlex.quote(str(PurePath(folder) / node_name(node))) for node in nodes], placed=placed)
        (said,) = yield (Command(argv=("sh",), stdin=text, host=self._host, timeout_s=TIMEOUT_S),)
        return read(said, nodes)

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Tell the batch script, which tells the ranks; or cancel the job."""
        if not places.job_of(run):
            return True
        wait_s = 0 if not wait else KILL_WAIT_S if kill else run.job.grace + STOP_MARGIN_S
        how = "kill" if kill else "save"
        command = self._ask(questions.STOP, places.job_of(run), how, f"{wait_s:.0f}", *places.folders(run))
        (done,) = yield (replace(command, timeout_s=wait_s + 30),)
        if done.returncode > 1:
            raise UnavailableError(f"cannot stop {run.name}: {_last_line(done, 'no answer')}")
        return done.returncode == 0

    def remove(self, run: Run, *, look: bool) -> Verb[tuple[Footprint, ...]]:
        """The run's folder on the cluster, where it is not that of its record."""
        path, host = str(run.handle.get("dir", run.folder)), str(self._host or "")
        if path == run.folder and not host:
            return ()
        if PurePath(path).name != run.name or not PurePath(path).is_absolute():  # a record that was renamed, or worse
            raise ConfigError(f"{run.name} was not removed: its record says that its folder is {path}: rename it back")
        (output,) = yield (replace(footprint.command(shlex.quote(path), look=look), host=self._host),)
        return (footprint.read(output, path, host),)

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command beside the ranks of a node, by a further step of their job."""
        if places.tasks_of(run):
            raise ConfigError(f"{run.name} is an array of jobs: no command can be run beside one of them")
        if node >= run.job.max_nodes:
            raise NoInputError(f"{run.name} has no node {node}: it has {counted(run.job.max_nodes, 'node')}")
        pty = ("--pty",) if tty else ()
        number, workdir = str(run.handle["job"]), places.workdir(run)
        words = beside(
            run.job, self.options, number=number, node=node, workdir=workdir, run_dir=places.folders(run)[0],
            argv=argv, tty=tty,
        )  # fmt: skip
        command = self._ask(questions.EXECUTE, number, str(node), workdir, *pty, "--", *words, stream=True)
        (done,) = yield (replace(command, mode="tty" if tty else "stream"),)
        if done.returncode == Exit.UNAVAILABLE:
            raise UnavailableError(f"{run.name} has no nodes at present: ddpctl status {run.name}")
        return done.returncode

    def _ask(self, text: str, *words: str, stream: bool = False) -> Command:
        argv = ("sh", "-c", text, "ddpctl", *words)
        return Command(
            argv=argv, host=self._host, mode="stream" if stream else "capture", timeout_s=None if stream else 60
        )


def _nodes(run: Run) -> int:
    return run.job.max_nodes


def _last_line(output: Output, otherwise: str) -> str:
    lines = output.stderr.strip().splitlines()
    return lines[-1] if lines else otherwise
