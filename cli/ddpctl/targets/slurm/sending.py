"""How a job reaches Slurm: by sbatch's stdin, or as a script inside of an allocation that is there."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import PurePath

from ddpctl.command import Command, Host, Output, Verb
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError
from ddpctl.plan import Plan
from ddpctl.targets import Submission
from ddpctl.targets.slurm.looks import PREFIX, unreachable
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.places import expand
from ddpctl.targets.slurm.script import render_script

STARTS = re.compile(r"to start at (\S+) using .* on nodes (\S+) in partition (\S+)")
REHEARSED = "<job>"  # a dry run's
WRITE = 'umask 077; mkdir -p "${1%/*}" && cat >"$1"'


def to_sbatch(
    plan: Plan, options: SlurmOptions, host: Host | None, secrets: Mapping[str, str], records: str
) -> Verb[Submission]:
    """Ask when it would start, make its folder, submit."""
    script = render_script(plan, options)
    depends = yield from _dependency(options, records)
    log = f"{plan.run_dir}/job{'-%a' if options.array else ''}.log"
    argv = (
        "sbatch",
        f"--job-name={plan.run}",
        f"--output={plan.run_dir.replace('%', '%%')}{log.removeprefix(plan.run_dir)}",
        f"--chdir={plan.cwd}",
        *depends,
    )
    (tested,) = yield (Command(argv=(*argv, "--test-only"), host=host, stdin=script, probe=True),)
    if error := unreachable(tested, host):
        raise error
    tasks = expand(options.array) if options.array else ()
    yield from _write_secrets(plan, host, secrets, tasks)
    (made,) = yield (Command(argv=("mkdir", "-p", plan.run_dir), host=host),)
    if made.returncode:
        raise CannotWriteError(f"cannot make {plan.run_dir}: {_last_line(made)}")
    (sent,) = yield (
        Command(argv=(*argv, "--parsable"), host=host, stdin=script, placeholder=REHEARSED, timeout_s=120),
    )
    if sent.returncode:
        if error := unreachable(sent, host):
            raise error
        (has,) = yield (Command(argv=("sinfo", "--noheader", "--format=%P %D %c %m %G"), host=host, probe=True),)
        raise _refused(plan, sent, has)
    job = sent.stdout.strip().split(";")[0]
    handle = {"job": job, "dir": plan.run_dir, "workdir": plan.cwd}
    if tasks:
        handle["tasks"] = list(tasks)  # type: ignore[assignment]
    if host is not None:
        handle["logs"] = f"{host}:{plan.run_dir}"
    return Submission(handle=handle, note=_note(job, tested), checkpoint_dir=plan.checkpoint_dir)


def into_allocation(plan: Plan, options: SlurmOptions, secrets: Mapping[str, str], allocation: str) -> Verb[Submission]:
    """Run the script here, on the nodes that this shell has been given."""
    yield from _write_secrets(plan, None, secrets)
    path = f"{plan.run_dir}/job.sh"
    (made,) = yield (Command(argv=("sh", "-c", WRITE, "ddpctl", path), stdin=render_script(plan, options)),)
    if made.returncode:
        raise CannotWriteError(f"cannot write {path}: {_last_line(made)}")
    log = f"{plan.run_dir}/job.log"
    (started,) = yield (Command(argv=("bash", path), cwd=plan.cwd, mode="background", output=log, placeholder="<pid>"),)
    handle = {"job": allocation, "pid": started.stdout.strip(), "dir": plan.run_dir, "workdir": plan.cwd}
    note = f"on all nodes of the allocation that this shell has (job {allocation})"
    return Submission(handle=handle, note=note, checkpoint_dir=plan.checkpoint_dir)


def _dependency(options: SlurmOptions, records: str) -> Verb[tuple[str, ...]]:
    if options.after is None:
        return ()
    record = str(PurePath(records) / options.after / "run.json")
    (found,) = yield (Command(argv=("cat", record), probe=True),)
    try:
        job = str(json.loads(found.stdout)["handle"]["job"])
    except (ValueError, KeyError, TypeError):
        raise NoInputError(f"after: {options.after} is no run on Slurm (looked at {record})") from None
    return (f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes")


def _write_secrets(
    plan: Plan, host: Host | None, secrets: Mapping[str, str], tasks: tuple[str, ...] = ()
) -> Verb[None]:
    """Into the run's folder, or the folders of an array's jobs: each job removes its own."""
    if not secrets:
        return
    text = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items())
    places = [f"{plan.run_dir}/task-{task}/secrets" for task in tasks] or [f"{plan.run_dir}/secrets"]
    for path in places:
        (done,) = yield (Command(argv=("sh", "-c", WRITE, "ddpctl", path), host=host, stdin=text, secret=True),)
        if done.returncode:
            raise CannotWriteError(f"cannot write {path}: {_last_line(done)}")


def _note(job: str, tested: Output) -> str:
    what = "Slurm would take it" if job == REHEARSED else f"job {job}"
    if match := STARTS.search(tested.stderr):
        return f"{what}, could start at {match[1]} on {match[2]} (partition {match[3]})"
    if tested.returncode:  # it may be taken all the same: nodes that are down come back
        what = "Slurm may not take it" if job == REHEARSED else what
        return f"{what}: {PREFIX.sub('', _last_line(tested))}"
    return what


def _refused(plan: Plan, sent: Output, has: Output) -> Exception:
    said = PREFIX.sub("", _last_line(sent))
    asked = f"{plan.job.nodes} nodes of {plan.job.gpus} GPUs" if plan.job.device != "cpu" else f"{plan.job.nodes} nodes"
    there = [
        f"{words[0]} {words[1]} nodes with {words[2]} CPUs, {words[3]} MB, {words[4].replace('(null)', 'no GPU')}"
        for line in has.stdout.splitlines()
        if len(words := line.split()) == 5
    ]
    listing = f"; the partitions have: {'; '.join(there[:5])}" if has.returncode == 0 and there else ""
    return ConfigError(f"Slurm does not take the job ({asked}): {said}{listing}")


def _last_line(output: Output) -> str:
    lines = output.stderr.strip().splitlines()
    return lines[-1] if lines else "it failed"
