"""The target ``local``: all nodes run on this machine.

Each node is a ddprun process. The nodes communicate over the loopback interface. Each node gets a share of the
machine's GPUs. On a machine without GPUs, the ranks use the CPU and gloo. The command ``python -m ddprun.nodectl``
prints the state and the logs of nodes, sends signals and finds a free port.
"""

import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from ddpctl.command import SHELL, TIMED_OUT, Command, Output, Verb
from ddpctl.errors import CannotWriteError, ConfigError, NoInputError, UnavailableError
from ddpctl.execution.node_probe import TIMEOUT_S, Probe, ProbeResult, probe_script, read_probe
from ddpctl.job.launch_plan import (
    CHECK_PYTHON,
    Plan,
    check_script,
    contract,
    ddprun_args,
    find_script,
    look_for_script,
    package_of,
    title,
)
from ddpctl.job.secrets import make_store_secret, read_secrets
from ddpctl.job.spec import JobSpec
from ddpctl.job.values import Options
from ddpctl.runs.run_status import RunStatus, fold_nodes, node_report
from ddpctl.runs.run_store import Run
from ddpctl.targets import Capability, LogQuery, StopSignal, Submission, Target, no_such_log
from ddpctl.text import counted, one_line
from ddpwire import job_env, names, run_files
from ddpwire.exits import Exit
from ddpwire.machine import MIG
from ddpwire.run_files import TARGETS

MISSING = 66  # exit code of the probe if a module is not found
YOUNG_S = 5.0  # how long a launch may take between writing its record and starting its first process
STOP_MARGIN_S = 5.0  # how long a ddprun may take beyond the grace period of its ranks
KILL_WAIT_S = 5.0
_OF_CONTAINERS = ("image", "cpus", "memory", "shm", "mounts")
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class LocalOptions(Options):
    """The options of a target of kind local."""

    python: str = ""
    """The Python that runs the ranks, with torch installed. Empty: the Python that runs ddpctl."""


class LocalTarget(Target):
    """The target local, whose nodes are processes of this machine."""

    kind = "local"
    capabilities = frozenset[Capability]({"interrupt", "stop", "tethered", "uneven"})

    def __init__(self, options: LocalOptions, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(options, environ)
        self._python = options.python or sys.executable

    def render(self, plan: Plan) -> str:
        """Return a bash script that starts the nodes and waits until they end."""
        return render_script(plan, self.options.python or "python3")

    def expect(self, plan: Plan) -> Verb[None]:
        """Check that the training script is in the project's folder, where the rendered script runs it."""
        return find_script(plan)

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Check this machine, choose a port, and start one ddprun per node."""
        job = plan.job
        read_secrets(job, self.environ)  # only checks them: a node inherits them from the environment
        gpu_probes = () if job.device == "cpu" else (_nodectl(self._python, "gpus", probe=True),)
        answers = yield (*gpu_probes, *self._probes(plan))
        torch, port, *others = answers[len(gpu_probes) :]
        if torch.returncode:
            raise _unusable_python(self._python, torch)
        if (package := package_of(job.command)) and others[0].returncode == MISSING:
            raise NoInputError(f"-m {package}: no such module in {plan.cwd} or in the packages of {self._python}")
        check_script(plan, *others)
        if port.returncode:
            raise UnavailableError(port.last_line("no free port"))
        gpus = share_gpus(job, gpus_of(answers[0]) if gpu_probes else ())
        (made,) = yield (Command(argv=("sh", "-c", make_store_secret('"$1"'), "ddpctl", plan.folder)),)
        made.check(f"cannot write {plan.folder}", CannotWriteError)
        number = port.stdout.strip() if port.stdout.startswith("<") else str(next(_answers(port, 1))["port"])
        yield tuple(
            Command(
                argv=(self._python, "-P", "-m", "ddprun", *ddprun_args(plan)),
                env={
                    **job.env,
                    **contract(plan, node=node, addr=LOOPBACK, port=number),
                    names.NODES_HERE: str(job.max_nodes),
                    names.TARGETS_DIR: str(PurePath(plan.folder).parent / TARGETS),
                    names.LAUNCHER: "local",
                    names.DEVICE: "cuda" if gpus else "cpu",
                    CUDA_VISIBLE_DEVICES: ",".join(gpus[node]) if gpus else "",
                },
                cwd=plan.cwd,
                mode="background",
                output=str(PurePath(plan.folder) / run_files.node_name(node) / run_files.NODE_LOG),
                stdin_inherited=attached and job.world_size == 1,
                tether=attached,
                starts=True,
            )
            for node in range(job.max_nodes)
        )
        notes = []
        if not gpus and job.device != "cpu":
            notes.append(f"no GPU here: {counted(job.world_size, 'CPU rank')} with gloo")
        if unused := [name for name in _OF_CONTAINERS if getattr(job, name) != getattr(JobSpec(), name)]:
            notes.append(f"no container here: {', '.join(unused)} not used")
        return Submission(handle={"port": number}, note="\n".join(notes))

    def _probes(self, plan: Plan) -> tuple[Command, ...]:
        want = ("--want", str(plan.job.port)) if plan.job.port else ()
        probes = [
            Command(argv=(self._python, "-c", CHECK_PYTHON), probe=True),
            _nodectl(self._python, "port", *want, placeholder="<port>"),
        ]
        if package := package_of(plan.job.command):
            find = f"import sys, importlib.util as u; sys.exit({MISSING} * (u.find_spec(sys.argv[1]) is None))"
            argv = (self._python, "-c", find, package)
            probes.append(Command(argv=argv, env=plan.job.env, cwd=plan.cwd, probe=True))
        return (*probes, *look_for_script(plan))

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Return the status of each run from the folders of its nodes."""
        dirs = tuple(path for run in runs for path in node_dirs(run))
        (shown,) = yield (_nodectl(self._python, "show", *dirs),)
        shown.check("cannot ask the nodes")
        answers = _answers(shown, len(dirs))
        reports = [tuple(node_report(node, next(answers)) for node in range(run.job.max_nodes)) for run in runs]
        return tuple(
            fold_nodes(run.name, nodes, young=now - run.created < YOUNG_S)
            for run, nodes in zip(runs, reports, strict=True)
        )

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the logs of the nodes, or of some ranks."""
        options = ["--follow"] if query.follow else []
        options += [f"--node={node}" for node in query.nodes] + [f"--rank={rank}" for rank in query.ranks]
        if query.timestamps:
            options += [f"--file={name}" for files in query.files(run).values() for name in files]
        options += [] if query.tail is None else [f"--tail={query.tail}"]
        (done,) = yield (_nodectl(self._python, "logs", *options, run.folder, mode="stream", timeout_s=None),)
        if done.returncode == Exit.NO_INPUT:
            raise no_such_log(run)
        if done.returncode == Exit.CANNOT_WRITE:
            raise CannotWriteError("")  # nodectl has already reported it

    def probe(self, run: Run, probe: Probe) -> Verb[tuple[ProbeResult, ...]]:
        """Read the nodes' folders and fetch their metrics."""
        text = probe_script(probe, [shlex.quote(path) for path in node_dirs(run)])
        (output,) = yield (Command(argv=SHELL, stdin=text, timeout_s=TIMEOUT_S),)
        return read_probe(output, range(run.job.max_nodes))

    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:
        """Signal every ddprun, and wait until none is alive."""
        wait_s = 0 if not wait else KILL_WAIT_S if signal == "KILL" else run.job.stop_s + STOP_MARGIN_S
        arguments = ("--signal", signal, "--wait", f"{wait_s:g}", *node_dirs(run))
        (done,) = yield (_nodectl(self._python, "signal", *arguments, timeout_s=wait_s + TIMEOUT_S),)
        done.check(f"cannot stop {run.name}")
        return not any(answer["alive"] for answer in _answers(done, run.job.max_nodes))

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Run a command in the run's project folder, with the run's environment variables."""
        env = contract(run, node=node, addr=LOOPBACK, port=str(run.handle.get("port", "")))
        command = Command(argv=argv or ("/bin/sh",), env={**run.job.env, **env}, cwd=run.cwd)
        (done,) = yield (replace(command, mode="tty" if tty else "stream", timeout_s=None),)
        return done.returncode


def _answers(output: Output, count: int) -> Iterator[dict[str, Any]]:
    """Return the objects that nodectl has printed, one JSON object per line. Other lines are skipped.

    Raises UnavailableError if there are not exactly ``count`` objects.
    """
    answers = []
    for line in output.stdout.splitlines():
        with suppress(ValueError):
            if isinstance(answer := json.loads(line), dict):
                answers.append(answer)
    if len(answers) != count:
        shown = one_line(output.stdout.strip()[:60]) or output.last_line("nothing")
        raise UnavailableError(f"unexpected answer of ddprun.nodectl: {shown}", hint="check the target's 'python'")
    return iter(answers)


def node_dirs(run: Run) -> tuple[str, ...]:
    """Return the folders of a run's nodes, in the order of the nodes."""
    return tuple(str(PurePath(run.folder) / run_files.node_name(node)) for node in range(run.job.max_nodes))


def find_gpus() -> Verb[tuple[str, ...]]:
    """Return the GPUs of this machine."""
    return gpus_of(*(yield (_nodectl(sys.executable, "gpus", probe=True),)))


def gpus_of(listing: Output) -> tuple[str, ...]:
    """Return the GPUs that ``nodectl gpus`` has printed. Raises UnavailableError if it has failed."""
    if listing.returncode:
        raise UnavailableError(one_line(listing.last_line()), hint="repair the driver, or use --device cpu")
    return tuple(listing.stdout.split())


def _nodectl(python: str, *arguments: str, **rest: Any) -> Command:
    return Command(argv=(python, "-P", "-m", "ddprun.nodectl", *arguments), **rest)


def share_gpus(job: JobSpec, gpus: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of each node, or an empty tuple if the ranks use the CPU.

    Raises ConfigError if several ranks would use MIG instances, or if there are too few GPUs. In the second case, the
    error has the fields ``gpus_needed`` and ``gpus_found``.
    """
    need = job.num_gpus
    if job.device == "cpu" or (job.device == "auto" and not gpus):
        return ()
    if need > 1 and gpus and gpus[0].startswith(MIG):
        raise ConfigError(f"{_asked(job)}: {_ON_MIG}", hint="use one GPU, or --device cpu for CPU ranks")
    if len(gpus) < need:
        insists = "--device cuda: " if job.device == "cuda" else ""
        raise ConfigError(
            f"{insists}{_needed(job)}, but this machine has {len(gpus) or 'none'}",
            hint=f"{'use fewer, or' if gpus else 'use'} --device cpu for CPU ranks",
            gpus_needed=need,
            gpus_found=len(gpus),
        )
    free = iter(gpus)
    return tuple(tuple(itertools.islice(free, job.gpus_of(node))) for node in range(job.max_nodes))


_ON_MIG = "CUDA_VISIBLE_DEVICES names MIG instances, but only a job with one GPU can use a MIG instance"


def _asked(job: JobSpec) -> str:
    if isinstance(job.gpus, tuple):
        return f"nodes with {' + '.join(map(str, job.gpus))} GPUs"
    return f"{counted(job.max_nodes, 'node')} x {counted(job.gpus, 'GPU')}"


def _needed(job: JobSpec) -> str:
    return f"the job needs {counted(job.num_gpus, 'GPU')} ({_asked(job)})"


def _unusable_python(python: str, output: Output) -> UnavailableError:
    """Return the error for a Python that cannot start the ranks. ``output``: the output of ``CHECK_PYTHON``."""
    hint = "set the target's 'python' to a Python that has torch and ddpctl[agent]"
    if output.returncode == Exit.SCRIPT:
        problem = f"{python}: {output.last_line()}"
    elif output.returncode == TIMED_OUT:
        problem = f"cannot check whether {python} has torch ({output.last_line()})"
        hint = "launch again when the machine is less busy"
    else:
        problem = f"cannot run {python}: {output.last_line('it failed').removeprefix(f'{python}: ')}"
    return UnavailableError(problem, hint=hint)


# The rendered spec: a bash script that needs no ddpctl


def render_script(plan: Plan, python: str) -> str:
    """Return the job as a bash script that does not need ddpctl."""
    job = plan.job
    need, counts = job.num_gpus, " ".join(str(job.gpus_of(node)) for node in range(job.max_nodes))
    exports = {
        **job_env.pack({name: value for name, value in job.env.items() if name != CUDA_VISIBLE_DEVICES}),
        names.NNODES: job.nodes,
        names.NODE_MASTER_ADDR: LOOPBACK,
    }
    if CUDA_VISIBLE_DEVICES in job.env:  # the script divides these GPUs among the nodes
        exports[CUDA_VISIBLE_DEVICES] = job.env[CUDA_VISIBLE_DEVICES]
    if job.device != "auto":
        exports[names.DEVICE] = job.device
    lines = "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items())
    nodectl = f"{shlex.quote(python)} -P -m ddprun.nodectl"
    port = str(job.port) if job.port else f"$({nodectl} port | tr -dc 0-9)"
    gpus = "_ddp_listed=\n"  # the job's device is cpu
    if job.device != "cpu":
        gpus = f"""\
_ddp_listed=$({nodectl} gpus) || {{
  echo "repair the driver, or export CUDA_VISIBLE_DEVICES= (to use CPUs)" >&2
  exit {Exit.UNAVAILABLE:d}
}}
"""
    return f"""\
#!/usr/bin/env bash
# {title(job)} on this machine. Each node is a ddprun process on the loopback interface.
# Rendered by ddpctl render. RUN_DIR sets the folder for logs and checkpoints.
set -euo pipefail

{lines}
{names.NODE_MASTER_PORT}={port}
{names.RUN_DIR}=${{RUN_DIR:-$PWD/runs/{plan.name}-$$}}
{names.SECRET_FILE}=${names.RUN_DIR}/{run_files.STORE_SECRET}
export {names.NODE_MASTER_PORT} {names.RUN_DIR} {names.SECRET_FILE}
{make_store_secret(f'"${names.RUN_DIR}"')}
echo "logs and checkpoints: ${names.RUN_DIR}" >&2

# Find the GPUs, and divide them among the nodes. Without GPUs, the ranks use the CPU.
{gpus}mapfile -t _ddp_gpus < <(grep . <<<"$_ddp_listed")
if [[ {need} -gt 1 && ${{_ddp_gpus[*]}} == MIG-* ]]; then
  echo "{_asked(job)}: {_ON_MIG}: to use CPUs, run export CUDA_VISIBLE_DEVICES=" >&2
  exit {Exit.CONFIG:d}
fi
if ((${{#_ddp_gpus[@]}} > 0 && ${{#_ddp_gpus[@]}} < {need})); then
  echo "{_needed(job)}, but this machine has ${{#_ddp_gpus[@]}}:" \\
    "to use CPUs, run export CUDA_VISIBLE_DEVICES=" >&2
  exit {Exit.CONFIG:d}
fi

_ddp_pids=()
_ddp_counts=({counts})
trap 'kill -TERM "${{_ddp_pids[@]}}" 2>/dev/null || true' TERM
trap : INT # the terminal also sends Ctrl-C to the nodes
for ((_ddp_node = 0; _ddp_node < {job.max_nodes}; _ddp_node++)); do
  _ddp_share=("${{_ddp_gpus[@]::_ddp_counts[_ddp_node]}}") _ddp_gpus=("${{_ddp_gpus[@]:_ddp_counts[_ddp_node]}}")
  CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${{_ddp_share[*]}}") {names.NODE_RANK}=$_ddp_node \\
    {names.NPROC_PER_NODE}={job.ranks or "${_ddp_counts[_ddp_node]}"} \\
    {shlex.quote(python)} -P -m ddprun {shlex.join(ddprun_args(plan))} &
  _ddp_pids+=("$!")
done

_ddp_code=0
for _ddp_pid in "${{_ddp_pids[@]}}"; do
  while kill -0 "$_ddp_pid" 2>/dev/null; do sleep 0.2 || true; done # a wait that a signal interrupts may lose the code
  wait "$_ddp_pid" || _ddp_code=$?
done
exit "$_ddp_code"
"""
