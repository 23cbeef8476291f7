"""The verbs of the target kaggle: what the official client is asked for, in which order.

Credentials are the client's own affair. It can push, ask, print and fetch; it cannot stop a session.
"""

import sys
from pathlib import PurePath

from ddpctl.command import Command, Output, Verb
from ddpctl.errors import ConfigError, NoInputError, UnavailableError
from ddpctl.plan import Plan, script_of
from ddpctl.run import Run, RunStatus
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.kaggle import cells
from ddpctl.targets.kaggle.answers import read_push, read_status, read_user, with_log
from ddpctl.targets.kaggle.cells import Cargo
from ddpctl.targets.kaggle.options import INSIDE, KaggleOptions
from ddpctl.targets.kaggle.refusals import refusal
from ddpctl.words import either
from ddpwire import folder, kaggle
from ddpwire.version import __version__

ASK_S = 60.0
PUSH_S = 300.0
PULL_S = 3600.0
WAIT_S = 15  # between two looks at a session that waits, or has not ended with its log
_WRITE = 'umask 077; mkdir -p "$1" && cat >"$1/$2"'
_PRINT = 'text=$(kaggle kernels logs "$1") || exit; shift; printf %s "$text" | "$0" -P -m ddpctl.kaggle_log "$@"'


class KaggleTarget:
    """Versions of private notebooks."""

    def __init__(self, options: KaggleOptions) -> None:
        self.options = options

    def render(self, plan: Plan) -> str:
        """The notebook, of a job that needs no file. Raises ConfigError for one that does."""
        if needed := self._needs(plan):
            travel, are = ("travel", "are") if len(needed) > 1 else ("travels", "is")
            raise ConfigError(
                f"{either(needed, 'and')} {travel} in the notebook, and {are} read when it is written: "
                "ddpctl render --target kaggle --out FOLDER"
            )
        return cells.notebook(plan, Cargo())

    def files(self, plan: Plan) -> Verb[dict[str, str]]:
        """The notebook and its metadata, as ``kaggle kernels push`` takes them: name → text."""
        owner = self.options.owner or (yield from self._user())
        cargo = yield from self._load(plan)
        return {
            cells.notebook_file(plan.run): cells.notebook(plan, cargo),
            cells.METADATA: cells.metadata(plan, self.options, owner),
        }

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:
        """Write both beside the run's record, and push them."""
        del attached  # a session goes on without this ddpctl in any case
        owner = self.options.owner or (yield from self._user())
        cargo = yield from self._load(plan)
        where = str(PurePath(plan.run_dir) / "kaggle")
        texts = (
            (cells.notebook_file(plan.run), cells.notebook(plan, cargo)),
            (cells.METADATA, cells.metadata(plan, self.options, owner)),
        )
        written = yield tuple(
            Command(argv=("sh", "-c", _WRITE, "ddpctl", where, name), stdin=text) for name, text in texts
        )
        if any(output.returncode for output in written):
            raise UnavailableError(f"cannot write {where}: {_last(written)}")
        limit = ("--timeout", str(plan.job.time_limit_s)) if plan.job.time_limit_s else ()
        kernel = f"{owner}/{cells.slug_of(plan.run)}"
        url = f"https://www.kaggle.com/code/{kernel}"
        (pushed,) = yield (
            Command(
                argv=("kaggle", "kernels", "push", "--path", where, *limit),
                timeout_s=PUSH_S,
                placeholder=f"Kernel version 1 successfully pushed.  Please check progress at {url}\n",
            ),
        )
        if why := refusal(pushed, f"push {kernel}"):
            why.nothing_started = True
            raise why
        done = read_push(pushed.stdout)
        return Submission(
            handle={"kernel": kernel, "version": done.version, "url": done.url, "logs": done.url},
            note=f"version {done.version} of {kernel}",
            table=done.without,
            checkpoint_dir=f"{kernel}:{kaggle.RUNS}/{plan.run}/{folder.CHECKPOINTS}",
        )

    def _user(self) -> Verb[str]:
        """Whom the client is logged in as. Raises UnavailableError."""
        (said,) = yield (Command(argv=("kaggle", "config", "view"), probe=True, timeout_s=ASK_S),)
        if why := refusal(said, "ask the kaggle client for its user"):
            why.nothing_started = True
            raise why
        owner = read_user(said.stdout)
        if owner is None:
            raise UnavailableError("the kaggle client is not logged in: kaggle auth login, or set the target's `owner`")
        return owner

    def _needs(self, plan: Plan) -> tuple[str, ...]:
        script = script_of(plan.job.command)
        return (*([script] if script else []), *self.options.files)

    def _load(self, plan: Plan) -> Verb[Cargo]:
        """What travels in the notebook. Raises NoInputError."""
        names = self._needs(plan)
        texts = (yield tuple(Command(argv=("cat", name), cwd=plan.cwd, probe=True) for name in names)) if names else ()
        for name, text in zip(names, texts, strict=True):
            if text.returncode:
                raise NoInputError(f"{name}: no such file in {plan.cwd}")
            if "\n%%" in f"\n{text.stdout}":
                raise ConfigError(f"{name}: a line that begins with %% cannot travel in a notebook's cell")
        files = {name: text.stdout for name, text in zip(names, texts, strict=True)}
        if self.options.wheel != INSIDE:
            return Cargo(files=files)
        argv = (sys.executable, "-P", "-m", "ddpctl.own_wheel")
        (wheel,) = yield (Command(argv=argv, placeholder="<wheel>", timeout_s=ASK_S),)
        if wheel.returncode:
            raise UnavailableError(f"cannot pack ddpctl's wheel: {_last((wheel,))}")
        return Cargo(wheel=wheel.stdout.strip(), wheel_name=f"ddpctl-{__version__}-py3-none-any.whl", files=files)

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:
        """Ask Kaggle for each session, and those that have ended for their last words."""
        del now
        asked = tuple(run for run in runs if run.handle)
        answers = yield tuple(_status(run) for run in asked)
        found = {run.name: _read(run, answer) for run, answer in zip(asked, answers, strict=True)}
        ended = tuple(run for run in asked if found[run.name].state in ("succeeded", "failed"))
        logs = (yield tuple(_log(run) for run in ended)) if ended else ()
        for run, log in zip(ended, logs, strict=True):
            if log.returncode == 0:
                found[run.name] = with_log(found[run.name], log.stdout)
        lost = "it was never pushed"
        return tuple(found.get(run.name) or RunStatus(run=run.name, state="lost", message=lost, code=1) for run in runs)

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print what the notebook said, or some ranks; followed, from when its session has begun until it has ended."""
        words = [] if query.tail is None else [f"--tail={query.tail}"]
        words += [f"--rank={rank}" for rank in query.ranks] + [f"--node={node}" for node in query.nodes]
        kernel = str(run.handle["kernel"])
        if not query.follow:
            argv = ("sh", "-c", _PRINT, sys.executable, kernel, *words)
            (done,) = yield (Command(argv=argv, mode="stream", timeout_s=None),)
            if done.returncode:
                raise UnavailableError(f"{run.name} has no log that can be read yet: ddpctl status {run.name}")
            return
        if (yield from self._wait(run, ("pending", "unknown"))).ended:
            yield from self.logs(run, LogQuery(ranks=query.ranks, nodes=query.nodes, tail=query.tail))
            return
        yield (Command(argv=("kaggle", "kernels", "logs", "--follow", kernel), mode="stream", timeout_s=None),)
        yield from self._wait(run, ("pending", "training", "stopping", "unknown"))

    def _wait(self, run: Run, while_in: tuple[str, ...]) -> Verb[RunStatus]:
        """Look now and then until it is in another state."""
        tries = 0
        while True:
            (found,) = yield from self.status((run,), now=0.0)
            tries = tries + 1 if found.state == "unknown" else 0
            if found.state not in while_in or tries > 5:
                return found
            yield (Command(argv=("sleep", str(WAIT_S)), timeout_s=2.0 * WAIT_S),)

    def stop(self, run: Run, *, kill: bool, wait: bool = True) -> Verb[bool]:
        """Nothing but the website stops a session. Raises UnavailableError, unless it was never pushed."""
        del kill, wait
        if run.handle:
            raise UnavailableError(f"{run.name}: {self.farewell(run)}")
        yield ()
        return True

    def farewell(self, run: Run) -> str:
        """That it goes on, and where a person stops it."""
        return (
            f"it goes on: the kaggle client cannot stop a session. Cancel is on {run.handle['url']}; "
            f"kaggle kernels delete {run.handle['kernel']} removes the notebook with all that it has written"
        )

    def pull(self, run: Run, into: str) -> Verb[None]:
        """Fetch what the session wrote to its working folder, and its log. Raises DdpctlError."""
        argv = ("kaggle", "kernels", "output", str(run.handle["kernel"]), "--path", into, "--force")
        (done,) = yield (Command(argv=argv, timeout_s=PULL_S),)
        if why := refusal(done, f"fetch the output of {run.handle['kernel']}"):
            raise why

    def execute(self, run: Run, *, node: int, argv: tuple[str, ...], tty: bool) -> Verb[int]:
        """Nothing can be run in a session from outside. Raises ConfigError."""
        del node, argv, tty
        raise ConfigError(f"{run.name}: nothing can be run in a Kaggle session from outside")


def _status(run: Run) -> Command:
    return Command(argv=("kaggle", "kernels", "status", str(run.handle["kernel"])), timeout_s=ASK_S)


def _log(run: Run) -> Command:
    return Command(argv=("kaggle", "kernels", "logs", str(run.handle["kernel"])), timeout_s=ASK_S)


def _read(run: Run, answer: Output) -> RunStatus:
    why = refusal(answer, f"ask for {run.handle['kernel']}")
    if why is None:
        return read_status(run.name, answer.stdout)
    if isinstance(why, NoInputError):
        return RunStatus(run=run.name, state="lost", message=str(why), code=int(why.exit_code))
    return RunStatus(run=run.name, state="unknown", message=str(why))


def _last(outputs: tuple[Output, ...]) -> str:
    lines = "\n".join(output.stderr for output in outputs).strip().splitlines()
    return lines[-1] if lines else "it failed without a word"
