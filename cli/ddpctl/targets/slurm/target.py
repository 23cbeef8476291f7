"""The operations (verbs) of the target slurm, which run commands on the login node.

A run is a job or a job array. If ddpctl runs inside an allocation (salloc), the run is a script in the allocation.
"""

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePath

from ddpctl.command import NOT_FOUND, TIMED_OUT, UNREACHED, Command, Host, Output, Verb, call, write_file
from ddpctl.environment import ignored_options
from ddpctl.errors import CannotWriteError, ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import TIMEOUT_S, Probe, ProbeResult, probe_script, read_probe
from ddpctl.files import environments
from ddpctl.files.pull import Place, pull_places
from ddpctl.job.launch_plan import Plan, check_script, find_script, look_for_script, script_of
from ddpctl.job.secrets import read_secrets
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run, read
from ddpctl.targets import Capability, LogQuery, Lookup, StopSignal, Submission, Target, no_such_log
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.batch_script import beside, directives, render_script
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.queue import node_files, read_answers, starts_file, status_of, together
from ddpwire import run_files
from ddpwire.exits import Exit
from ddpwire.run_files import node_name

YOUNG_S = 20.0  # how long Slurm may not know a job that it has just accepted
KILL_WAIT_S = 60.0  # twice Slurm's own KillWait, which is 30 s at most sites
STOP_MARGIN_S = 15.0  # for Slurm, before and after the seconds in which ddprun stops
# What sbatch prints if it finds no slurm.conf, no controller or no munge (22.05).
NO_SLURM = re.compile(
    r"configuration source|process configuration file|contact slurm controller|control machine address"
    r"|Munge \w+ failed|authentication error|Zero Bytes were transmitted|Socket timed out",
    re.IGNORECASE,
)
# What sbatch prints if it has sent the job, and gets no reply.
LOST_REPLY = re.compile(
    r"Socket timed out|Zero Bytes|(receive|send|shutdown) failure|not connected|reset by peer|Broken pipe",
    re.IGNORECASE,
)
# Reasons for which sbatch --test-only refuses a job that sbatch accepts, because the job can wait (22.05 to 25.05).
MAY_WAIT = re.compile(
    r"nodes are busy|reservation is in use|held state|node not available|accounting/QOS policy"
    r"|not available now|inactive or drain|inactive state|licenses",
    re.IGNORECASE,
)
PREFIX = re.compile(r"^(sbatch: )?((error|fatal|allocation failure): )?(Batch job submission failed: )?")
RUNS = ".local/state/ddpctl/runs"
# What sbatch --test-only prints (22.05).
STARTS = re.compile(r"to start at (\S+) using .* on nodes (\S+) in partition (\S+)")
SINFO = ("sinfo", "--noheader", "--format=%P %D %c %m %G")
DRY_RUN = "<job>"  # stands for the job's number in a dry run


class SlurmTarget(Target):
    """The target slurm, whose runs are jobs or job arrays."""

    kind = "slurm"
    capabilities = frozenset[Capability]({"discovery", "interrupt", "pull", "queue", "spares", "stop"})

    def __init__(self, options: SlurmOptions, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(options, environ)
        self._host = Host.from_text(options.login) if options.login else None  # None: this machine is a login node
        self._environment: Mapping[str, object] = {}

    def render(self, plan: Plan) -> str:
        """Return the batch script."""
        self._check(plan)
        if self.options.environment:
            raise ConfigError("environment: ddpctl render installs nothing: use ddpctl launch, or set 'python' instead")
        return render_script(plan, self.options)

    def expect(self, plan: Plan) -> Verb[None]:
        """Check that the training script is in the project's folder on this machine.

        Do nothing if that folder is not on this machine, or the script may be in the image.
        """
        path = PurePath(script_of(plan.job.command) or "")
        in_image = self.options.runtime != "none" and path.is_absolute()
        if self._host is None and not in_image:
            yield from find_script(replace(plan, cwd=self.options.workdir or plan.cwd))

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- the job outlives ddpctl
        """Submit the batch script with sbatch. If ddpctl runs inside an allocation, start the script there."""
        self._check(plan)
        secrets = read_secrets(plan.job, self.environ)  # first: it may raise, and nothing has been made yet
        records = str(PurePath(plan.folder).parent)  # on this machine; the next line changes the folder
        plan = yield from self._plan_on_cluster(plan)
        if commands := look_for_script(plan, self._host):
            (test,) = yield commands
            # `unreachable` takes other codes for those of sbatch, but this is test(1).
            if test.returncode == UNREACHED and (error := unreachable(test, self._host)):
                raise error
            check_script(plan, test, host=self._host)
        yield from self._prepare_environment(plan)
        # Only sbatch can start an array, and SLURM_JOB_ID is the allocation of this machine's shell.
        if self._host is None and not self.options.array and (allocation := self.environ.get("SLURM_JOB_ID")):
            return (yield from self._start_in_allocation(plan, secrets, allocation))
        return (yield from self._submit_to_sbatch(plan, secrets, records))

    def _prepare_environment(self, plan: Plan) -> Verb[None]:
        """Make the environment of the options if the cluster does not have it, and use its Python."""
        if not self.options.environment:
            return
        folder = str(PurePath(plan.folder).parent / ".environments")
        recipe = yield from environments.read_recipe(self.options)
        self.options = recipe.resolve(self.options, folder)
        python = shlex.quote(str(self.options.python))
        text = environments.record_text(python)
        check = Command(argv=("sh",), stdin=text, host=self._host, probe=True)
        (state,) = yield (check,)
        if not state.stdout.strip():
            yield from environments.make([self._host], str(self.options.python), recipe)
        use = environments.use_text(python, shlex.quote(plan.folder))
        (state,) = yield (replace(check, stdin=use + text, probe=False, placeholder='"<versions>"'),)
        if not (record := environments.recorded(state.stdout)):
            raise UnavailableError("the environment was not made: see the lines above")
        self._environment = record

    def _check(self, plan: Plan) -> None:
        # They separate mounts, and the parts of a mount.
        if self.options.runtime != "none" and re.search("[,:\n]", plan.cwd):
            raise ConfigError(f"the folder {plan.cwd!r} cannot be mounted: its name has a comma, colon or line break")

    def _plan_on_cluster(self, plan: Plan) -> Verb[Plan]:
        """Return the plan with the folders of the cluster instead of those of this machine. Raises UnavailableError."""
        workdir, runs = self.options.workdir, self.options.runs
        if self._host and not (workdir and runs):
            # The paths are quoted, are options of sbatch and are kept in the record: nothing there expands ~.
            (home,) = yield (Command(argv=("printenv", "HOME"), host=self._host, probe=True),)
            home.check(str(self._host))
            workdir = workdir or home.stdout.strip()
            runs = runs or str(PurePath(home.stdout.strip()) / RUNS)
        if workdir:
            plan = replace(plan, cwd=workdir)
        if runs:
            # A run that continues from another run uses the checkpoints of that run.
            checkpoints = PurePath(plan.checkpoint_dir)
            if not checkpoints.is_relative_to(runs):
                checkpoints = PurePath(runs) / checkpoints.parent.name / run_files.CHECKPOINTS
            plan = replace(plan, folder=str(PurePath(runs) / plan.name), checkpoint_dir=str(checkpoints))
        return plan

    def _submit_to_sbatch(self, plan: Plan, secrets: Mapping[str, str], records: str) -> Verb[Submission]:
        """Submit the job. Before that, check it with sbatch --test-only, and create its folder and secrets."""
        options, host, script = self.options, self._host, render_script(plan, self.options)
        depends = yield from self._dependency(records)
        log = f"{plan.folder}/job{'-%a' if options.array else ''}.log"
        # sbatch replaces patterns such as %a in --output.
        output = f"{plan.folder.replace('%', '%%')}{log.removeprefix(plan.folder)}"
        argv = ("sbatch", f"--job-name={plan.name}", f"--output={output}", f"--chdir={plan.cwd}", *depends)
        tested, listing = yield (
            # From stdin: no file is written before Slurm is known to answer.
            Command(argv=(*argv, "--test-only"), host=host, stdin=script, probe=True),
            # ddpctl keeps SBATCH_* of the user from sbatch (environment.py), so the note must name them.
            Command(argv=("printenv",), host=host, probe=True),
        )
        if error := unreachable(tested, host):
            raise error
        ignored = ignored_options(listing.stdout, directives(plan.job, options))
        path = yield from self._write_files(plan, script, secrets)
        submission = Submission(handle=self._handle(plan), checkpoint_dir=plan.checkpoint_dir)
        # The script ignores the uid. queue.LOCATE finds the job by it.
        sbatch = (*argv, "--parsable", path, plan.uid)
        # After the time-out, the job may exist (is_lost), so it is longer than usual.
        (sent,) = yield (Command(argv=sbatch, host=host, placeholder=DRY_RUN, timeout_s=120, starts=True),)
        job = sent.stdout.strip().split(";")[0]  # --parsable prints JOB or JOB;CLUSTER
        if is_lost(sent) or (sent.returncode == 0 and job != DRY_RUN and not job.isdecimal()):
            reason = PREFIX.sub("", sent.last_line("sbatch printed no job number"))
            raise UnavailableError(f"the reply of Slurm was lost ({reason})", submission=submission)
        # After is_lost: of the same texts, some may mean a lost reply, and then the job may exist.
        if sent.returncode and (error := unreachable(sent, host)):
            raise error
        # The test decides only in a dry run. Otherwise, sbatch itself has the last word.
        may_start = tested.returncode == 0 or MAY_WAIT.search(tested.stderr)
        if sent.returncode or (job == DRY_RUN and not may_start):
            (has,) = yield (Command(argv=SINFO, host=host, probe=True),)
            raise _refused(plan, sent, tested, has, ignored)
        note = f"{_note(job, tested)}\n{ignored}".rstrip()
        return replace(submission, handle={"job": job, **submission.handle}, note=note)

    def locate(self, run: Run) -> Verb[Lookup]:
        """Find the job by the uid of its launch."""
        plan = yield from self._plan_on_cluster(run)
        (answer,) = yield (self._ask(queue.LOCATE, run.uid, plan.folder, f"{run.created:.0f}"),)
        if answer.returncode == 1:  # LOCATE's own code for "no job"; any other is no answer
            return Lookup(state="absent")
        if answer.returncode or not (match := re.fullmatch(r"(?:@(\d+):)?(\d+)\s*", answer.stdout)):
            return Lookup(state="unknown", message=f"Slurm does not answer: {answer.last_line('no answer')}")
        pid = {"pid": match[1]} if match[1] else {}  # a script inside of an allocation
        return Lookup(state="exists", handle={"job": match[2], **pid, **self._handle(plan)})

    def _handle(self, plan: Plan) -> Mapping[str, object]:
        tasks = {"tasks": list(expand(self.options.array))} if self.options.array else {}
        logs = {"logs": f"{self._host}:{plan.folder}"} if self._host else {}
        return {"dir": plan.folder, "workdir": plan.cwd, **tasks, **logs, **self._environment}

    def _dependency(self, records: str) -> Verb[tuple[str, ...]]:
        """Return the options of sbatch for the run that the job waits for. Raises DdpctlError if it has failed."""
        if (name := self.options.after) is None:
            return ()
        folder = Path(records) / name
        (record,) = yield (call(read, folder, probe=True),)
        run: Run | None = record.value
        if run is None or run.kind != self.kind or not run.handle.get("job"):
            raise NoInputError(f"after: '{name}' is not a run on Slurm (its record: {folder / run_files.RECORD})")
        # Slurm starts a job at once if it has forgotten the job that it depends on, also if that job failed.
        (state,) = yield from self.status((run,), now=math.inf)  # inf: the run is not young
        if state.state == "succeeded":
            return ()
        if state.ended or state.state == "unknown":
            wrong = ConfigError if state.ended else UnavailableError
            raise wrong(f"after: run '{name}' must have succeeded, but it is {state.state}: {state.message}")
        # Otherwise Slurm would keep a job whose dependency can no longer be fulfilled in the queue for ever.
        return (f"--dependency=afterok:{run.handle['job']}", "--kill-on-invalid-dep=yes")

    def _start_in_allocation(self, plan: Plan, secrets: Mapping[str, str], allocation: str) -> Verb[Submission]:
        """Start the script on this machine. It uses all nodes of the allocation in which ddpctl runs."""
        path = yield from self._write_files(plan, render_script(plan, self.options), secrets)
        log = f"{plan.folder}/job.log"
        (started,) = yield (
            Command(argv=("bash", path), cwd=plan.cwd, mode="background", output=log, placeholder="<pid>", starts=True),
        )
        handle = {"job": allocation, "pid": started.stdout.strip(), **self._handle(plan)}
        note = f"on all nodes of this shell's allocation (job {allocation})"
        return Submission(handle=handle, note=note, checkpoint_dir=plan.checkpoint_dir)

    def _write_files(self, plan: Plan, script: str, secrets: Mapping[str, str]) -> Verb[str]:
        """Write the secrets to the folder of the run, or of each task of an array, and the batch script. Return its
        path.
        """
        path = f"{plan.folder}/job.sh"
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())
        tasks = expand(self.options.array) if self.options.array else ()
        places = [f"{plan.folder}/task-{task}/secrets" for task in tasks] or [f"{plan.folder}/secrets"]
        for file, text in {**dict.fromkeys(places if secrets else (), exports), path: script}.items():
            (done,) = yield (write_file(file, text, host=self._host, secret=file != path),)
            done.check(f"cannot write {file}", CannotWriteError)
        return path

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of each run from Slurm and from the folders of its nodes."""
        parts = [self.tasks(run) or (run,) for run in runs]
        every = [part for tasks in parts for part in tasks]
        places = [(folder_of(part), range(part.job.max_machines)) for part in every]
        files = tuple(path for place, nodes in places for path in (starts_file(place), *node_files(place, nodes)))
        # One query for all runs, by the number of the array and not of its tasks.
        jobs = ",".join(dict.fromkeys(job_of(run) for run in runs if job_of(run)))
        (output,) = yield (self._ask(queue.ASK, jobs, *files),)
        if output.returncode:
            message = f"the query of its state failed: {output.last_line('no answer')}"
            return tuple(RunStatus(run=run.name, state="unknown", message=message) for run in runs)
        answers = read_answers(output.stdout)
        # If a job has several lines, the first one counts.
        number_of = {job.number: job for job in reversed(answers.jobs)}

        def status(run: Run, parts: tuple[Run, ...]) -> RunStatus:
            young = now - run.created < YOUNG_S
            states = tuple(
                status_of(part, folder_of(part), number_of.get(job_of(part)), answers, young=young) for part in parts
            )
            return together(run, states, tasks_of(run)) if tasks_of(run) else states[0]

        return tuple(map(status, runs, parts))

    def tasks(self, run: Run) -> tuple[Run, ...]:
        """Return each task of a job array as a run."""
        return tuple(task_run(run, task) for task in tasks_of(run))

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the log of the job, or of some nodes or ranks. With ``query.follow``, also print why the job waits."""
        files = log_files(run, query)
        text = queue.FOLLOW if query.follow else queue.PRINT
        tail = "+1" if query.tail is None else str(query.tail)
        (done,) = yield (self._ask(text, job_of(run), tail, *files, stream=True),)
        if done.returncode == Exit.NO_INPUT:
            raise no_such_log(run)

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Return the metrics and files of each node. The login node fetches all of them."""
        if tasks := tasks_of(run):
            hint = f"select one of them with --task (known: {', '.join(tasks)})"
            raise ConfigError(f"run '{run.name}' is an array of {len(tasks)} trainings", hint=hint)
        nodes, folder = range(run.job.max_machines), folder_of(run)
        # Field 5 of a line is the time of the start (batch_script.py). Before the first start, there is no file.
        placed = f"cut -d' ' -f5 {shlex.quote(starts_file(folder))} 2>/dev/null"
        folders = [shlex.quote(str(PurePath(folder) / node_name(node))) for node in nodes]
        text = probe_script(probe, folders, placed=placed)
        (output,) = yield (Command(argv=("sh",), stdin=text, host=self._host, timeout_s=TIMEOUT_S),)
        return read_probe(output, nodes)

    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Cancel a waiting job. Signal a running job's script, which signals the ranks. KILL cancels any job of ddpctl.

        An allocation that the user has made is never cancelled.
        """
        if not job_of(run):  # sbatch has refused it, or its reply was lost
            return True
        wait_s = 0 if not wait else KILL_WAIT_S if signal == "KILL" else run.job.stop_s + STOP_MARGIN_S
        command = self._ask(queue.STOP, job_of(run), signal, f"{wait_s:.0f}", *run_folders(run))
        (done,) = yield (replace(command, timeout_s=wait_s + 30),)  # Slurm's own answers take time, too
        if done.returncode > 1:  # 1: the job still exists
            raise UnavailableError(f"cannot stop {run.name}: {done.last_line('no answer')}")
        return done.returncode == 0

    def how_to_stop_by_hand(self, run: Run) -> str:
        """Return a phrase that says how a user can stop a job that ddpctl did not launch."""
        return f"use scancel {run.handle['job']}" if job_of(run) else super().how_to_stop_by_hand(run)

    def roots(self, run: Run) -> tuple[tuple[Host | None, str], ...]:
        """Return the folder that contains all runs on the cluster. Raises ConfigError.

        Return an empty tuple if the run's files are in the folder of its record.
        """
        path = PurePath(folder_of(run))
        if str(path) == run.folder and not self._host:
            return ()
        if path.name != run.name or not path.is_absolute():  # the record was renamed, or is damaged
            to_do = f"rename the folder '{run.name}' back to '{path.name}', or repair the record"
            reason = f"its record names another folder, {path}"
            raise ConfigError(f"run '{run.name}' was not removed, because {reason}: {to_do}")
        return ((self._host, str(path.parent)),)

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Copy the run's folder from the login node. Raises ConfigError if the run's files are on this machine."""
        if not run.elsewhere:
            return (yield from super().pull(run, into, best=best))
        own = folder_of(run)
        folders = {"": shlex.quote(own)}
        if not PurePath(run.checkpoint_dir).is_relative_to(own):
            folders[run_files.CHECKPOINTS] = shlex.quote(run.checkpoint_dir)
        place = Place(name=str(self._host), shell=Command(argv=("/bin/sh",), host=self._host), folders=folders)
        return (yield from pull_places(run.name, [place], into, best=best))

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command where a node's ranks run, as an additional step of their job."""
        if tasks_of(run):
            raise ConfigError(f"run '{run.name}' is an array of jobs: ddpctl cannot run commands in it")
        pty = ("--pty",) if tty else ()
        number, workdir = str(run.handle["job"]), str(run.handle.get("workdir", run.cwd))
        inside = beside(
            run.job, self.options, number=number, node=node, workdir=workdir, run_dir=run_folders(run)[0],
            argv=argv, tty=tty,
        )  # fmt: skip
        command = self._ask(queue.EXECUTE, number, str(node), workdir, *pty, "--", *inside, stream=True)
        (done,) = yield (replace(command, mode="tty" if tty else "stream"),)
        if done.returncode == Exit.UNAVAILABLE:
            raise UnavailableError(f"run '{run.name}' has no nodes at present: see ddpctl status {run.name}")
        return done.returncode

    def _ask(self, text: str, *arguments: str, stream: bool = False) -> Command:
        argv = ("sh", "-c", text, "ddpctl", *arguments)
        return Command(
            argv=argv, host=self._host, mode="stream" if stream else "capture", timeout_s=None if stream else 60
        )


def unreachable(output: Output, host: Host | None) -> DdpctlError | None:
    """Return an error if the output of sbatch shows that Slurm cannot be reached. Return None if Slurm answered."""
    if output.returncode == UNREACHED and host is not None:
        return UnavailableError(f"{host}: {output.last_line('no answer')}")
    if output.returncode == NOT_FOUND:
        reason = "sbatch is not installed"
    elif output.returncode == TIMED_OUT:
        reason = f"sbatch: {output.last_line('no answer')}"
    else:
        # sbatch exits with 1 also if Slurm refuses the job, so only its text tells. Earlier lines may be about retries.
        last = next((line for line in reversed(output.stderr.splitlines()) if NO_SLURM.search(line)), None)
        if output.returncode == 0 or last is None:
            return None
        reason = f"sbatch: {PREFIX.sub('', last)}"
    to_do = f"{'' if host else 'run ddpctl on a login node, or '}set the target's 'login' to a login node"
    hint = f"{to_do}; ddpctl render prints the script, and needs no cluster"
    return UnavailableError(f"no Slurm is reachable from {host or 'this machine'} ({reason})", hint=hint)


def is_lost(sent: Output) -> bool:
    """Return whether sbatch has ended, or was ended, without a reply from Slurm: the job may have been submitted."""
    # Above NOT_FOUND (127): by a signal, or the connection to the login node was lost (UNREACHED).
    killed = sent.returncode < 0 or sent.returncode > NOT_FOUND or sent.returncode == TIMED_OUT
    return killed or (sent.returncode != 0 and LOST_REPLY.search(sent.stderr) is not None)


def expand(array: str) -> tuple[str, ...]:
    """Return the indices of a job array. For example, return 0, 3, 6 and 9 for ``0-6:3,9%2``."""

    def numbers() -> Iterator[int]:
        for part in array.split("%")[0].split(","):  # after %: how many run at once
            span, _, step = part.partition(":")
            first, _, last = span.partition("-")
            yield from range(int(first), int(last or first) + 1, int(step or 1))

    return tuple(str(number) for number in dict.fromkeys(numbers()))  # ranges may overlap


def job_of(run: Run) -> str:
    """Return the job's number, or "" if there is no job yet.

    For a script inside an allocation, return ``@PID:JOB``.
    """
    pid, job = run.handle.get("pid"), str(run.handle.get("job", ""))
    return f"@{pid}:{job}" if pid else job


def tasks_of(run: Run) -> tuple[str, ...]:
    """Return the indices of a job array, or an empty tuple if the run is not an array."""
    return tuple(run.handle.get("tasks", ()))


def task_run(run: Run, task: str) -> Run:
    """Return a task of a job array as a run."""
    name, checkpoints = f"task-{task}", PurePath(run.checkpoint_dir)
    handle = {key: value for key, value in run.handle.items() if key != "tasks"}
    handle |= {"job": f"{job_of(run)}_{task}", "dir": f"{folder_of(run)}/{name}"}
    handle |= {"log": f"{folder_of(run)}/job-{task}.log", "task": task}
    if run.elsewhere:
        handle["logs"] = f"{run.logs_at}/{name}"
    return replace(
        run,
        name=f"{run.name}.{name}",
        folder=f"{run.folder}/{name}",
        checkpoint_dir=str(checkpoints.parent / name / checkpoints.name),
        job=replace(
            run.job,
            env={**run.job.env, "SLURM_ARRAY_TASK_ID": task},
            checkpoint_dir=run.job.checkpoint_dir and f"{run.job.checkpoint_dir}/{name}",
        ),
        handle=handle,
    )


def folder_of(run: Run) -> str:
    """Return the run's folder on the cluster. In the folder of a job array, each task has its own folder."""
    return str(run.handle.get("dir", run.folder))


def run_folders(run: Run) -> tuple[str, ...]:
    """Return the run's folder on the cluster. For a job array, return the folder of each task."""
    return tuple(f"{folder_of(run)}/task-{task}" for task in tasks_of(run)) or (folder_of(run),)


def log_files(run: Run, query: LogQuery) -> tuple[str, ...]:
    """Return arguments for ``queue.PRINT``: for each file, the prefix of its lines and its path. Raises ConfigError."""
    place, tasks = folder_of(run), tasks_of(run)
    if query.timestamps and tasks:
        raise ConfigError(f"{run.name} is an array", hint=f"--timestamps needs --task K: {', '.join(tasks)}")
    if query.nodes and not query.ranks and not query.timestamps:  # what a node's ddprun prints is in the job's log
        query = replace(query, ranks=tuple(range(run.job.world_size)))
    if not query.ranks and not query.timestamps:
        if not tasks:
            return ("", str(run.handle.get("log", f"{place}/job.log")))
        return tuple(word for task in tasks for word in (f"[task {task}] ", f"{place}/job-{task}.log"))
    arguments: list[str] = []
    for path, before in zip(run_folders(run), [f"[task {task}] " for task in tasks] or [""], strict=True):
        for node, files in query.files(run).items():
            for name, mark in files.items():
                arguments += [before + mark, f"{path}/{node_name(node)}/{name}"]
    return tuple(arguments)


def _note(job: str, tested: Output) -> str:
    text = "Slurm would accept the job" if job == DRY_RUN else f"job {job}"
    if match := STARTS.search(tested.stderr):
        return f"{text}; it could start at {match[1]} on {match[2]} (partition {match[3]})"
    if tested.returncode:  # Slurm may still accept the job: nodes that are down may return
        text = "Slurm may reject the job" if job == DRY_RUN else text
        return f"{text}: {PREFIX.sub('', tested.last_line('it failed'))}"
    return text


def _refused(plan: Plan, sent: Output, tested: Output, has: Output, ignored: str) -> Exception:
    """Return the error for a job that sbatch refuses, or that ``sbatch --test-only`` refuses in a dry run."""
    refusal = "Slurm rejects the job" if sent.returncode else "sbatch --test-only refuses the job"
    reason = PREFIX.sub("", (sent if sent.returncode else tested).last_line("it failed"))
    lines = has.stdout.splitlines()
    request = f"{plan.job.nodes} nodes" + (f" of {plan.job.gpus} GPUs" if plan.job.device != "cpu" else "")
    partitions = [
        f"{name}: {nodes} nodes with {cpus} CPUs, {memory} MB, {gres.replace('(null)', 'no GPU')}"
        for name, nodes, cpus, memory, gres in (fields for fields in map(str.split, lines) if len(fields) == 5)
    ]
    # Five, so that the error stays readable.
    listing = f"; the partitions have: {'; '.join(partitions[:5])}" if has.returncode == 0 and partitions else ""
    # Without a listing, nothing is known: give no advice.
    has_gpus = not partitions or any(not partition.endswith("no GPU") for partition in partitions)
    cpu = "" if has_gpus or plan.job.device == "cpu" else "for CPU ranks, use --device cpu"
    return ConfigError(f"{refusal} ({request}): {reason}{listing}", hint="; ".join(filter(None, (cpu, ignored))))
