"""The operations (verbs) of the target kaggle, which run Kaggle's client and parse its output.

The client handles credentials itself. It can push a notebook, query its status, print its log and download its output.
It cannot stop a session.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Literal

from ddpctl.command import NOT_FOUND, TIMED_OUT, Command, Output, Verb, call, write_file
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.files.own_wheel import wheel_text
from ddpctl.job.launch_plan import Plan, script_of
from ddpctl.runs.run_status import RunStatus, State
from ddpctl.runs.run_store import Run
from ddpctl.targets import Capability, LogQuery, Lookup, StopSignal, Submission, Target
from ddpctl.targets.kaggle import notebook as kaggle_notebook
from ddpctl.targets.kaggle.options import INSIDE, KaggleOptions
from ddpctl.text import cut, either, one_line
from ddpwire import kaggle, run_files
from ddpwire.exits import Exit

ASK_S = 60.0
PUSH_S = 300.0
PULL_S = 3600.0
MAX_REPORT = 400  # the maximum length of a message of the client
NOBODY = "your-name"  # stands for an owner that is not known
WAIT_S = 15  # between two checks of a session that has not started, or that has not ended although its log has ended
# What the client prints if it has sent the notebook, and gets no reply (requests 2.32).
LOST_REPLY = re.compile(r"[Rr]ead timed out|Connection aborted|RemoteDisconnected|reset by peer|50[0234] Server Error")
PUSH_ERROR = re.compile(r"^Kernel push error: (.*)$", re.MULTILINE)


class KaggleTarget(Target):
    """The target kaggle. Each run is a version of a private notebook."""

    kind = "kaggle"
    capabilities = frozenset[Capability]({"pull"})

    options: KaggleOptions

    def render(self, plan: Plan) -> str:
        """Return the notebook.

        Raises ConfigError if the job needs a script or files. The method ``files`` can include them.
        """
        if needed := self._needs(plan):
            to_do = "use ddpctl render --target kaggle --out FOLDER"
            raise ConfigError(f"{either(needed, 'and')} must be copied into the notebook's folder: {to_do}")
        return kaggle_notebook.notebook(plan)

    def files(self, plan: Plan) -> Verb[tuple[dict[str, str], str]]:
        """Return the files for ``kaggle kernels push`` (name → text), and a note for the user or an empty text.

        If the notebook's owner is unknown, the metadata contains a placeholder, and the note explains it.
        """
        owner, note = self.options.owner, ""
        if not owner:
            try:
                owner = yield from self._user()
            except DdpctlError:
                owner = NOBODY
                note = (
                    f"no kaggle client is installed and logged in, so the owner in {kaggle_notebook.METADATA} is "
                    f"'{NOBODY}': replace it with your Kaggle user name, or set the target's `owner`"
                )
        return (yield from self._texts(plan, owner)), note

    def _texts(self, plan: Plan, owner: str) -> Verb[dict[str, str]]:
        files, wheel = (yield from self._read_files(plan)), ""
        if self.options.wheel == INSIDE:
            (packed,) = yield (call(wheel_text, probe=True),)
            packed.check("cannot pack ddpctl's wheel")
            wheel = packed.value
        return {
            f"{plan.name}.ipynb": kaggle_notebook.notebook(plan, files, wheel),
            kaggle_notebook.METADATA: kaggle_notebook.metadata(plan, self.options, owner),
        }

    def dry_run(self, plan: Plan) -> Verb[Submission]:
        """Yield the command that pushes the notebook. Return a summary of the files that it would push."""
        user = yield from self._user()
        texts = yield from self._texts(plan, self.options.owner or user)
        yield (_push(plan),)
        head = f"would write these files into {_folder(plan)}:"
        return Submission(handle={}, table=(head, *kaggle_notebook.summary(plan, texts)))

    def submit(self, plan: Plan, *, attached: bool) -> Verb[Submission]:  # noqa: ARG002 -- the session outlives ddpctl
        """Write the notebook and its metadata to the run's local folder, and push them."""
        owner = self.options.owner or (yield from self._user())
        texts = yield from self._texts(plan, owner)
        where = _folder(plan)
        written = yield tuple(write_file(f"{where}/{name}", text) for name, text in texts.items())
        for output in written:
            output.check(f"cannot write {where}")
        kernel = f"{owner}/{kaggle_notebook.PREFIX}{plan.name}"
        (pushed,) = yield (_push(plan),)
        if error := kaggle_error(pushed, f"push {kernel}"):
            if pushed.returncode == TIMED_OUT or pushed.returncode < 0 or LOST_REPLY.search(pushed.stderr):
                raise UnavailableError(error.message, submission=None)  # it may have been pushed
            raise error
        if (done := _PUSHED.search(pushed.stdout)) is None:
            shown = pushed.stdout.strip()[:200]
            raise UnavailableError(f"ddpctl cannot parse the output of the kaggle client: {shown!r}", submission=None)
        version, url = done.groups()
        return Submission(
            handle={"kernel": kernel, "version": version, "url": url, "logs": url},
            note=f"version {version} of {kernel}",
            table=tuple(
                f"Kaggle does not know these {kind}, so they were left out of the notebook's inputs: {names}"
                for kind, names in _INVALID.findall(pushed.stdout)
            ),
            checkpoint_dir=f"{kernel}:{kaggle.RUNS}/{plan.name}/{run_files.CHECKPOINTS}",
        )

    def locate(self, run: Run) -> Verb[Lookup]:
        """Find the notebook by its name, because Kaggle does not keep the uid of a launch."""
        kernel = f"{self.options.owner or (yield from self._user())}/{kaggle_notebook.PREFIX}{run.name}"
        url = f"https://www.kaggle.com/code/{kernel}"
        run = replace(run, handle={"kernel": kernel, "url": url, "logs": url})
        (answer,) = yield (_ask("status", run),)
        state = _read(run, answer)
        if state.state == "unknown":
            return Lookup(state="unknown", message=state.message)
        return Lookup(state="absent") if state.state == "lost" else Lookup(state="exists", handle=run.handle)

    def _user(self) -> Verb[str]:
        (output,) = yield (Command(argv=("kaggle", "config", "view"), probe=True, timeout_s=ASK_S),)
        if error := kaggle_error(output, "read the user of the kaggle client"):
            raise error
        match = _USER.search(output.stdout)
        if match is None or match[1] == "None":
            raise UnavailableError("the kaggle client is not logged in: run kaggle auth login, or set `owner`")
        return match[1]

    def _needs(self, plan: Plan) -> tuple[str, ...]:
        script = script_of(plan.job.command)
        return (*([script] if script else []), *self.options.files)

    def _read_files(self, plan: Plan) -> Verb[dict[str, str]]:
        """Read the files that the notebook contains. Raises NoInputError, ConfigError, UnavailableError."""
        names = self._needs(plan)
        texts = (yield tuple(Command(argv=("cat", name), cwd=plan.cwd, probe=True) for name in names)) if names else ()
        for name, text in zip(names, texts, strict=True):
            if text.returncode == 1:
                raise NoInputError(f"{name}: no such file in {plan.cwd}")
            text.check(f"{name} in {plan.cwd} cannot be read")
            if "\n%%" in f"\n{text.stdout}":
                raise ConfigError(f"{name}: a line that begins with %% cannot be part of a notebook's cell")
        return {name: text.stdout for name, text in zip(names, texts, strict=True)}

    def status(self, runs: tuple[Run, ...], *, now: float) -> Verb[tuple[RunStatus, ...]]:  # noqa: ARG002
        """Return the status of each run from Kaggle. If its session has ended, also use the session's log."""
        pushed = [run for run in runs if run.handle]
        answers = yield tuple(_ask("status", run) for run in pushed)
        answer_of = {run.name: answer for run, answer in zip(pushed, answers, strict=True)}
        states = {run.name: _read(run, answer_of[run.name]) for run in pushed}
        ended = [run for run in pushed if states[run.name].state in ("succeeded", "failed")]
        logs = (yield tuple(_ask("logs", run) for run in ended)) if ended else ()
        for run, log in zip(ended, logs, strict=True):
            if log.returncode == 0:
                explained = _FAILURE.search(answer_of[run.name].stdout) is not None
                states[run.name] = with_log(states[run.name], log.stdout, explained=explained)
        never = RunStatus(run="", state="lost", message="it was never pushed", code=1)
        return tuple(states.get(run.name, replace(never, run=run.name)) for run in runs)

    def logs(self, run: Run, query: LogQuery) -> Verb[None]:
        """Print the session's log, or the lines of some nodes and ranks.

        ``query.follow``: wait until the session starts, and print all lines until it ends. While the session runs, the
        lines of some nodes or ranks cannot be followed. This raises ConfigError.
        """
        if query.timestamps:
            raise self._cannot(run, "tell when a line was written")
        if run.job.world_size == 1:  # its lines have no prefix
            query = replace(query, ranks=(), nodes=())
        if not query.follow:
            (log,) = yield (replace(_ask("logs", run), timeout_s=PULL_S),)
            if log.returncode:
                raise UnavailableError(f"run '{run.name}' has no readable log: see ddpctl status {run.name}")
            yield (Command(argv=("cat",), stdin=selected(log.stdout, query), mode="stream", timeout_s=None),)
            return
        chosen = bool(query.ranks or query.nodes)
        if (yield from self._wait(run, () if chosen else ("pending", "unknown"))).ended:
            yield from self.logs(run, replace(query, follow=False))
            return
        if chosen:
            text = f"run '{run.name}': until its session has ended, -f cannot be combined with --rank or --node"
            raise ConfigError(text, hint="omit -f, or omit --rank and --node")
        argv = ("kaggle", "kernels", "logs", "--follow", str(run.handle["kernel"]))
        yield (Command(argv=argv, mode="stream", timeout_s=None),)
        yield from self._wait(run, ("pending", "running", "stopping", "unknown"))

    def _wait(self, run: Run, while_in: tuple[str, ...]) -> Verb[RunStatus]:
        """Wait while the state of the run is in ``while_in``.

        Return early if several queries in a row get no answer from Kaggle.
        """
        tries = 0
        while True:
            (status,) = yield from self.status((run,), now=0.0)
            tries = tries + 1 if status.state == "unknown" else 0
            if status.state not in while_in or tries > 5:
                return status
            yield (Command(argv=("sleep", str(WAIT_S)), timeout_s=2.0 * WAIT_S),)

    def stop(self, run: Run, *, signal: StopSignal, wait: bool = True) -> Verb[bool]:  # noqa: ARG002
        """Return True if the run has no session. Otherwise, raise UnavailableError.

        Only Kaggle's website can stop a session.
        """
        if run.handle:
            raise UnavailableError(f"run '{run.name}': {self.exit_message(run)}")
        yield ()
        return True

    def exit_message(self, run: Run) -> str:
        """Return a message that says how a user can stop the session."""
        return (
            f"the session keeps running, because Kaggle's client cannot stop it: cancel it on {run.handle['url']}; "
            f"to remove the notebook and its output, run kaggle kernels delete {run.handle['kernel']}"
        )

    def pull(self, run: Run, into: str, *, best: bool = False) -> Verb[tuple[str, ...]]:
        """Download the files of the session's working folder, and its log. Raises DdpctlError."""
        if best:
            raise UsageError("--best: only the whole output of a Kaggle session can be downloaded: leave --best out")
        argv = ("kaggle", "kernels", "output", str(run.handle["kernel"]), "--path", into, "--force")
        (done,) = yield (Command(argv=argv, timeout_s=PULL_S),)
        if error := kaggle_error(done, f"fetch the output of {run.handle['kernel']}"):
            raise error
        return ()


def _folder(plan: Plan) -> str:
    return str(PurePath(plan.folder) / "kaggle")


def _push(plan: Plan) -> Command:
    limit = ("--timeout", str(plan.job.time_limit_s)) if plan.job.time_limit_s else ()
    return Command(argv=("kaggle", "kernels", "push", "--path", _folder(plan), *limit), timeout_s=PUSH_S, starts=True)


def _ask(verb: Literal["status", "logs"], run: Run) -> Command:
    return Command(argv=("kaggle", "kernels", verb, str(run.handle["kernel"])), timeout_s=ASK_S)


def _read(run: Run, answer: Output) -> RunStatus:
    error = kaggle_error(answer, f"read the state of {run.handle['kernel']}")
    if error is None:
        return read_status(run.name, answer.stdout)
    if isinstance(error, NoInputError):
        return RunStatus(run=run.name, state="lost", message=str(error), code=int(error.code))
    return RunStatus(run=run.name, state="unknown", message=str(error))


# Parsing: the client prints the state of a session, and the session's log shows how the ranks ended


# kagglesdk's KernelWorkerStatus (in lower case and without underscores, because older clients differ in both) → the
# state of a run, a message and the exit code.
_STATES: Mapping[str, tuple[State, str, int | None]] = {
    "queued": ("pending", "it is in Kaggle's queue", None),
    "newscript": ("pending", "it is in Kaggle's queue", None),
    "running": ("running", "its session is running", None),
    "complete": ("succeeded", "the notebook ran to the end", int(Exit.OK)),
    "error": ("failed", "the notebook failed", int(Exit.SCRIPT)),
    "cancelrequested": ("stopping", "it is being canceled", None),
    "cancelacknowledged": ("stopped", "it was canceled on the website", int(Exit.SAVED_TERM)),
}
_STATUS = re.compile(r'has status "(?:\w+\.)?(\w+)"')
_FAILURE = re.compile(r'^Failure message: "(.*)"$', re.MULTILINE | re.DOTALL)
_PUSHED = re.compile(r"^Kernel version (\d+) successfully pushed\. +Please check progress at (\S+)$", re.MULTILINE)
_INVALID = re.compile(r"^The following are not valid (.+?) and could not be added to the kernel: (.*)$", re.MULTILINE)
_USER = re.compile(r"^- username: (\S+)$", re.MULTILINE)
_OUTCOME = re.compile(r"^ddpctl outcome (\{.*\})$", re.MULTILINE)
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)

# Kaggle's messages about sessions that it ended itself.
_FAILURES = {
    r"memory": "the session ran out of memory: use a smaller batch, or --input loader",
    r"time limit|timed? ?out|exceeded.*(?:time|hours|duration)":
        "the session reached its time limit before the notebook ended",
    r"disk|space": "the session's disk is full: its working folder holds 20 GB",
    r"requested cancel|cancell?ed": "it was canceled on the website",
}  # fmt: skip


def read_status(run: str, text: str) -> RunStatus:
    """Parse the output of ``kaggle kernels status``."""
    match = _STATUS.search(text)
    word = match[1].replace("_", "").lower() if match else ""
    state, message, code = _STATES.get(word, ("unknown", f"Kaggle says: {text.strip()[:120]}", None))
    if failure := _FAILURE.search(text):
        reason = " ".join(failure[1].split())
        known = (sentence for pattern, sentence in _FAILURES.items() if re.search(pattern, reason, re.IGNORECASE))
        message = next((f"{sentence} (Kaggle: {reason})" for sentence in known), f"Kaggle: {reason}")
    return RunStatus(run=run, state=state, message=message, code=code)


def with_log(status: RunStatus, log: str, *, explained: bool = False) -> RunStatus:
    """Complete ``status``, that of an ended session, with the outcome or the error from the session's log.

    ``explained``: whether Kaggle has given a reason for the end. This reason takes precedence over an error in the log.
    """
    text = plain(log)
    if outcomes := _OUTCOME.findall(text):
        outcome = json.loads(outcomes[-1])
        state: State = "succeeded" if outcome["code"] == 0 else "stopped" if outcome["cause"] == "stopped" else "failed"
        return RunStatus(run=status.run, state=state, message=outcome["message"], code=int(outcome["code"]))
    if status.state == "failed" and not explained and (raised := _RAISED.findall(text)):
        return replace(status, message=f"the notebook failed: {raised[-1]}")
    return status


def plain(log: str) -> str:
    """Return a session's log as text. Kaggle's client prints the log as a JSON list of parts."""
    try:
        return "".join(str(part.get("data", "")) for part in json.loads(log))
    except (ValueError, TypeError, AttributeError):
        return log


def selected(log: str, query: LogQuery) -> str:
    """Return the lines of the requested nodes and ranks, or only the last ``query.tail`` of them.

    A line belongs to a rank if it begins with ``[nodeN rankR]``.
    """
    lines = plain(log).splitlines()
    if query.ranks or query.nodes:
        node = "|".join(map(str, query.nodes)) or "[0-9]+"
        rank = f" rank({'|'.join(map(str, query.ranks))})" if query.ranks else ".*"
        lines = [line for line in lines if re.match(rf"\[node({node}){rank}\]", line)]
    shown = lines if query.tail is None else lines[max(0, len(lines) - query.tail) :]
    return "".join(f"{line}\n" for line in shown)


# Errors of the client or of Kaggle whose messages do not explain what to do; all others are passed on. The client exits
# with 0 if a push is refused ("Kernel push error: ..."), and with 1 and a message on stdout or stderr for all other
# errors. The messages come from kaggle 2.2.4 and 2.2.5, and from Kaggle's servers as users have quoted them.


# A pattern in a message of the client → the error and its sentence, in which {0} is the pattern's first group.
_KNOWN_ERRORS: Mapping[str, tuple[type[DdpctlError], str]] = {
    r"Authentication required to call the Kaggle API|401 Client Error|Unauthenticated|Unauthorized":
        (UnavailableError, "the kaggle client is not logged in: run kaggle auth login, or put a token in "
         "~/.kaggle/access_token"),
    r"Maximum weekly GPU quota(?: of ([\d.]+) hours)? ?reached":
        (UnavailableError, "this week's GPU hours are used up: wait until they are renewed (see kaggle quota), or use "
         "--device cpu"),
    r"Maximum batch \w+ sessions?(?: count)?(?: of (\d+))? ?reached":
        (UnavailableError, "you have reached Kaggle's limit on simultaneous sessions ({0}): wait for a session to "
         "end, or cancel one on its page"),
    r"phone":
        (UnavailableError, "Kaggle gives GPUs and internet only to accounts with a verified phone number: "
         "verify yours at https://www.kaggle.com/settings"),
    r"(?:Notebook|Kernel) not found":
        (NoInputError, "you have no such notebook on Kaggle: check that the client is logged in as `owner`; a notebook "
         "that you created on the website must be saved there once"),
    r"409 Client Error|title (?:is )?already in use|^Conflict$":
        (ConfigError, "a notebook with that title already exists: give the run another --name"),
    r"Max retries exceeded|NameResolution|Failed to resolve|Connection refused|ConnectionError|timed out":
        (UnavailableError, "Kaggle cannot be reached from this machine: check the network; if there is a proxy, set "
         "HTTPS_PROXY"),
    r"Cannot (?:access|stream logs for) kernel|404 Client Error|resource was not found|^Not found$":
        (NoInputError, "the notebook does not exist or is not yours; it may have been deleted on the website"),
    r"unrecognized arguments|invalid choice":
        (UnavailableError, "this kaggle client is too old: pip install --upgrade kaggle (2.2 or newer)"),
    r"No module named '([\w-]+)'":  # kaggle 2.2.5 imports six without requiring it
        (UnavailableError, "the kaggle client lacks a module: pip install {}"),
}  # fmt: skip


def kaggle_error(output: Output, doing: str) -> DdpctlError | None:
    """Return the error of a failed command of the client, or None if it succeeded.

    ``doing`` follows the word "cannot" in the message.
    """
    pushed = PUSH_ERROR.search(output.stdout)
    if output.returncode == 0 and pushed is None:
        return None
    if output.returncode == NOT_FOUND:
        return UnavailableError("there is no kaggle client: run pip install kaggle six, then kaggle auth login")
    if output.returncode == TIMED_OUT:
        return UnavailableError(f"cannot {doing}: Kaggle's client: {output.stderr or 'no answer'}")
    text = pushed[1] if pushed else f"{output.stderr}\n{output.stdout}"
    for pattern, (error, sentence) in _KNOWN_ERRORS.items():
        if match := re.search(pattern, text, re.IGNORECASE | re.MULTILINE):
            group = next(iter(match.groups()), None) or "Kaggle does not name it"
            return error(f"cannot {doing}: {sentence.format(group)}")
    report = cut(one_line(" ".join(text.split())), MAX_REPORT)
    return UnavailableError(f"cannot {doing}: kaggle reports: {report or 'nothing'}")
