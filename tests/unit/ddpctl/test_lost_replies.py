"""A launch whose reply is lost: how its run is found, and when its record is deleted."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.unit.ddpctl import ssh_answers
from tests.unit.ddpctl.answers import Answer, only, perform
from tests.unit.ddpctl.test_slurm_target import ANSWERS, PLAN, RUN, UID

from ddpctl import targets
from ddpctl.command import TIMED_OUT, UNREACHED, Command, Output, Verb
from ddpctl.errors import ConfigError, DdpctlError, UnavailableError
from ddpctl.execution.executor import Executor
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher, lost_replies
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpctl.targets import Lookup, Submission
from ddpctl.targets.local import LocalOptions
from ddpctl.targets.slurm import queue
from ddpctl.targets.slurm.options import SlurmOptions
from ddpctl.targets.slurm.target import SlurmTarget
from ddpctl.targets.ssh import claims, scripts
from ddpctl.targets.ssh.options import SshOptions
from ddpctl.targets.ssh.target import SshTarget

TIMED_OUT_REPLY = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
EXISTS, ABSENT = Lookup(state="exists", handle={"job": "7"}), Lookup(state="absent")
UNKNOWN = Lookup(state="unknown", message="no answer")


@dataclass
class LosingTarget:
    """A target whose submission ends with ``error``, and that then answers ``lookups``, the last one repeatedly."""

    error: BaseException
    lookups: list[Lookup]
    kills: list[Run] = field(default_factory=list)
    num_asked: int = 0
    pid: int = 0  # of a process that the launch has started here
    starts: bool = True
    answers: bool = True
    capabilities = frozenset[str]()

    def resolve(self) -> Verb[LocalOptions]:
        yield ()
        return LocalOptions()

    def submit(self, *_: object, **__: object) -> Verb[Submission]:
        yield (Command(argv=("true",), starts=self.starts),)
        (started,) = yield (Command(argv=("/bin/sleep", "60"), mode="background"),)
        self.pid = int(started.stdout)
        raise self.error

    def locate(self, _: Run) -> Verb[Lookup]:
        yield ()
        self.num_asked += 1
        return self.lookups.pop(0) if len(self.lookups) > 1 else self.lookups[0]

    def stop(self, run: Run, **_: object) -> Verb[bool]:
        yield ()
        if not self.answers:
            raise self.error
        self.kills.append(run)
        return True

    def status(self, runs: tuple[Run, ...], **_: object) -> Verb[tuple[RunStatus, ...]]:
        yield ()
        return tuple(RunStatus(run=run.name, state="running" if run.handle else "lost", message="") for run in runs)


Launch = Callable[[LosingTarget], Run]


def lost() -> UnavailableError:
    return UnavailableError("the reply was lost", submission=Submission(handle={"dir": "/r"}, note="note"))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_replies, "ANSWER_GAP_S", 0.0)
    monkeypatch.setattr(lost_replies, "LOCATE_S", 60.0)  # of a busy machine


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short search, for a target that never answers."""
    monkeypatch.setattr(lost_replies, "LOCATE_S", 0.1)


@pytest.fixture
def context(tmp_path: Path) -> AppContext:
    return AppContext(executor=Executor(dict(os.environ)), root=tmp_path / "runs", emit=lambda _: None)


@pytest.fixture
def launch(context: AppContext, monkeypatch: pytest.MonkeyPatch) -> Launch:
    place = {
        "target": "local",
        "kind": "local",
        "options": LocalOptions(),
        "target_source": "",
        "cwd": "/",
        "name": "night",
    }

    def launch_on(target: LosingTarget) -> Run:
        monkeypatch.setattr(targets, "make", lambda *_: target)
        return launcher.start(context, Request(job=JobSpec(), **place), attached=False)  # type: ignore[arg-type]

    return launch_on


def records(context: AppContext) -> list[Mapping[str, object]]:
    return [run.handle for run in run_store.load_all(context.root)]


def test_a_run_that_exists_is_adopted(context: AppContext, launch: Launch) -> None:
    target = LosingTarget(lost(), [UNKNOWN, ABSENT, EXISTS])
    run = launch(target)
    assert (run.handle, records(context), target.kills) == ({"dir": "/r", "job": "7"}, [run.handle], [])


def test_a_record_is_deleted_only_after_two_answers(context: AppContext, launch: Launch) -> None:
    target = LosingTarget(lost(), [ABSENT])
    with pytest.raises(UnavailableError):
        launch(target)
    assert (records(context), target.num_asked) == ([], 2)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("lookups", [[UNKNOWN], [ABSENT, UNKNOWN]], ids=["no answer", "one answer"])
def test_a_run_that_may_exist_keeps_its_record(lookups: list[Lookup], context: AppContext, launch: Launch) -> None:
    target = LosingTarget(lost(), lookups)
    with pytest.raises(UnavailableError) as raised:
        launch(target)
    assert ("ddpctl stop night" in str(raised.value), records(context)) == (True, [{}])
    (state,) = launcher.status(context, run_store.load_all(context.root))
    assert state.state == "unknown"
    target.lookups[:] = [EXISTS]
    (state,) = launcher.status(context, run_store.load_all(context.root))
    assert (state.state, records(context)) == ("running", [{"job": "7"}])


@pytest.mark.usefixtures("patience")
def test_stop_kills_what_answers_and_says_that_the_rest_is_unknown(context: AppContext, launch: Launch) -> None:
    target = LosingTarget(lost(), [UNKNOWN])
    with pytest.raises(UnavailableError):
        launch(target)
    (run,), num_kills = run_store.load_all(context.root), len(target.kills)
    with pytest.raises(UnavailableError):
        launcher.stop(context, run, kill=False)
    assert (len(target.kills), records(context)) == (num_kills + 1, [{}])


def test_ctrl_c_cancels_a_run_that_exists(context: AppContext, launch: Launch) -> None:
    target = LosingTarget(KeyboardInterrupt(), [ABSENT, EXISTS])
    with pytest.raises(KeyboardInterrupt):
        launch(target)
    assert ([run.handle for run in target.kills], records(context)) == ([{"job": "7"}], [])


def test_a_run_without_all_of_its_nodes_is_stopped_and_looked_for_again(context: AppContext, launch: Launch) -> None:
    target = LosingTarget(lost(), [replace(EXISTS, is_whole=False), EXISTS])
    with pytest.raises(UnavailableError):
        launch(target)
    assert (len(target.kills), target.num_asked, records(context)) == (2, 2, [])


@pytest.mark.parametrize(
    ("error", "starts", "num_kills"),
    [
        (UnavailableError("no"), False, 0),
        (KeyboardInterrupt(), False, 0),
        (UnavailableError("no", is_undone=True), True, 0),
        (UnavailableError("no"), True, 1),
        (ConfigError("refused"), True, 1),
        (KeyboardInterrupt(), True, 1),
    ],
)
def test_a_launch_that_fails_is_stopped_unless_it_started_nothing(
    context: AppContext, launch: Launch, error: BaseException, starts: bool, num_kills: int
) -> None:
    target = LosingTarget(error, [EXISTS], starts=starts)
    with pytest.raises(type(error)):
        launch(target)
    assert (len(target.kills), records(context)) == (num_kills, [])
    assert not Path(f"/proc/{target.pid}").exists()
    assert target.num_asked == 0 or isinstance(error, KeyboardInterrupt), "its reply was not lost"


def test_a_launch_that_could_start_nothing_leaves_no_record_if_nothing_can_be_stopped(
    context: AppContext, launch: Launch
) -> None:
    with pytest.raises(UnavailableError):
        launch(LosingTarget(UnavailableError("no"), [ABSENT]))
    with pytest.raises(UnavailableError):  # what that launch of this process started does not count
        launch(LosingTarget(UnavailableError("no answer"), [UNKNOWN], starts=False, answers=False))
    assert records(context) == []


# Slurm


@pytest.mark.parametrize(
    ("sent", "is_lost"),
    [
        (Output(returncode=1, stderr=TIMED_OUT_REPLY), True),
        (Output(returncode=TIMED_OUT, stderr="no answer within 120 s"), True),
        (Output(returncode=0, stdout=""), True),
        (Output(returncode=127, stderr="sbatch: not found"), False),
        (Output(returncode=1, stderr="sbatch: error: Unable to contact slurm controller (connect failure)\n"), False),
    ],
    ids=["socket", "time-out", "no number", "no sbatch", "no controller"],
)
def test_only_some_errors_of_sbatch_may_have_submitted_the_job(sent: Output, is_lost: bool) -> None:
    with pytest.raises(DdpctlError) as raised:
        perform(SlurmTarget(SlurmOptions()).submit(PLAN, attached=True), ANSWERS | {"--parsable": sent})
    assert ("submission" in raised.value.fields) == is_lost


SQUEUE = '[[ -n "$JOBS" ]] && echo "$JOBS" || exit "${DOWN:-0}"'


def locate(folder: Path, *, programs: Mapping[str, str], **env: str) -> tuple[int, str]:
    """What the script prints; ``programs`` are Slurm's, as stand-ins."""
    for name, text in {"sacct": "exit 1", "scontrol": "echo 'MinJobAge = 60 sec'", **programs}.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    environ = {"PATH": f"{folder}/bin:/usr/bin:/bin", "JOBS": "", **env}
    since = env.get("SINCE", str(2**33))
    argv = ["sh", "-c", queue.LOCATE, "ddpctl", UID, str(folder), since]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout.strip()


def test_squeue_shows_the_uid_of_a_job_that_was_renamed(tmp_path: Path) -> None:
    jobs = f"5|/r/other/job.sh 0000\n7|/r/night/job.sh {UID}\n8|{UID}x"
    assert locate(tmp_path, programs={"squeue": SQUEUE}, JOBS=jobs) == (0, "7")
    assert locate(tmp_path, programs={"squeue": SQUEUE}, JOBS="5|/r/other/job.sh 0000") == (1, "")
    assert locate(tmp_path, programs={"squeue": SQUEUE}, DOWN="1") == (69, "")


def test_a_job_that_slurm_has_forgotten_is_in_its_folder_or_in_the_accounting(tmp_path: Path) -> None:
    (tmp_path / "job.sh").touch()
    long_ago = "0"
    assert locate(tmp_path, programs={"squeue": SQUEUE}) == (1, ""), "it cannot be forgotten yet"
    forgotten = str(int((tmp_path / "job.sh").stat().st_mtime) - 100)
    assert locate(tmp_path, programs={"squeue": SQUEUE}, SINCE=forgotten) == (69, "")
    assert locate(tmp_path, programs={"squeue": SQUEUE}, SINCE=long_ago) == (1, ""), "it would have its file by now"
    assert locate(tmp_path, programs={"squeue": SQUEUE, "sacct": "exit 0"}, SINCE=forgotten) == (1, "")
    row = f"echo '9|sbatch --parsable /r/night/job.sh {UID}'"
    assert locate(tmp_path, programs={"squeue": SQUEUE, "sacct": row}, SINCE=forgotten) == (0, "9")
    os.utime(tmp_path / "job.sh", (1, 1))
    (tmp_path / "starts").write_text("slurm 8 0 3 1000\n")
    assert locate(tmp_path, programs={"squeue": SQUEUE}, SINCE=forgotten) == (0, "8")


@pytest.mark.parametrize(
    ("stdout", "state", "handle"),
    [
        ("7\n", "exists", {"job": "7"}),
        ("@42:7\n", "exists", {"job": "7", "pid": "42"}),  # a script inside of an allocation
        ("", "unknown", {}),
        ("squeue: error: no answer\n", "unknown", {}),
    ],
)
def test_the_answer_of_a_cluster_is_the_handle_of_the_run(stdout: str, state: str, handle: dict[str, str]) -> None:
    run, answers = replace(RUN, uid=UID), {UID: Output(returncode=0, stdout=stdout)}
    _, lookup = perform(SlurmTarget(SlurmOptions()).locate(run), answers)
    assert (lookup.state, {key: lookup.handle.get(key) for key in handle}) == (state, handle)


AFTER = SlurmOptions(after="day")


@pytest.mark.parametrize(
    ("jobs", "outcome", "expected"),
    [
        ("5|N/A|RUNNING||N/A|\n", None, "--dependency=afterok:5"),
        ("5|N/A|FAILED||N/A|\n", None, ConfigError),
        ("", 1, ConfigError),
        ("", 0, ""),
        ("", None, ConfigError),
        ("error: no answer\n", None, UnavailableError),
    ],
    ids=["running", "failed", "failed-purged", "succeeded-purged", "killed-purged", "unknown"],
)
def test_a_run_that_waits_for_another_starts_only_if_that_succeeded(
    jobs: str, outcome: int | None, expected: str | type[DdpctlError]
) -> None:
    day = replace(RUN, name="day", job=replace(RUN.job, nodes="1"), handle={"job": "5", "dir": "/r/day"})
    state = f"==> squeue <==\n{jobs}"
    if outcome is not None:
        cause = "script" if outcome else "ok"
        state += f'==> /r/day/node-0/outcome.json <==\n{{"code": {outcome}, "cause": "{cause}", "message": "m"}}\n'
    answers: dict[str, Answer] = {
        "run_store.read": Output(returncode=0, value=day),
        "echo '\"'\"'==> squeue": Output(returncode=0, stdout=state),
    }
    verb = SlurmTarget(AFTER).submit(PLAN, attached=True)
    if isinstance(expected, str):
        commands, _ = perform(verb, answers | ANSWERS)
        depends = [word for word in only(commands, f"job.sh {UID}").argv if word.startswith("--dependency")]
        assert depends == ([expected] if expected else [])
    else:
        with pytest.raises(expected):
            perform(verb, answers | ANSWERS)


# SSH


def test_a_host_knows_the_nodes_of_a_launch_by_its_uid(tmp_path: Path) -> None:
    folder = scripts.claims_folder(str(tmp_path))
    environ = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}

    def sh(text: str) -> str:
        argv = ["/bin/sh"]
        return subprocess.run(argv, input=text, env=environ, capture_output=True, text=True, check=True).stdout

    assert sh(claims.find_nodes(folder, "night", UID)) == "", "a host without any claim"
    sh(claims.take(folder, "night", 1, ("GPU-0",), engine="none", uid=UID))
    assert sh(claims.find_nodes(folder, "night", UID)).split() == ["1"]
    assert sh(claims.find_nodes(folder, "night", "0000")) == "", "another launch of the same name"
    (text,) = (path.read_text() for path in tmp_path.glob("claims-*/run-*"))
    assert [claim.gpus for claim in claims.parse_claims(text.splitlines())] == [("GPU-0",)]


@pytest.mark.parametrize(
    ("answers", "nodes", "state", "hosts", "is_whole"),
    [
        (("1\n", "0\n"), "2", "exists", [1, 0], True),
        (("", "0\n"), "2", "exists", [1, 0], False),
        (("", ""), "2", "absent", None, True),
        (("0\n", None), "2", "unknown", None, True),
        (("0 1\n", None), "2", "exists", [0, 0], True),
    ],
    ids=["whole", "part", "absent", "silent", "whole-without-one-host"],
)
def test_a_run_on_hosts_is_located_by_its_claims(
    answers: tuple[str | None, ...], nodes: str, state: str, hosts: list[int] | None, is_whole: bool
) -> None:
    silent = Output(returncode=UNREACHED)
    outputs = [silent if text is None else Output(returncode=0, stdout=text) for text in answers]
    run = replace(ssh_answers.RUN, uid=UID, job=replace(ssh_answers.RUN.job, nodes=nodes))
    _, lookup = perform(SshTarget(ssh_answers.BARE).locate(run), {UID: ssh_answers.by_host(*outputs)})
    assert (lookup.state, lookup.handle.get("hosts"), lookup.is_whole) == (state, hosts, is_whole)


@pytest.mark.parametrize(
    ("failures", "has_submission"),
    [((UNREACHED, UNREACHED), True), ((UNREACHED, 0), True), ((75, UNREACHED), False), ((75, 0), None)],
)
def test_only_replies_that_were_lost_leave_it_open_whether_nodes_run(
    failures: tuple[int, int], has_submission: bool | None
) -> None:
    options: SshOptions = ssh_answers.BARE
    started = ssh_answers.by_host(*(Output(returncode=code) for code in failures))
    ready = [ssh_answers.facts(number, gpu=ssh_answers.GPUS) for number in (1, 2)]
    with pytest.raises(UnavailableError) as raised:
        ssh_answers.submit(*ready, options=options, answers={ssh_answers.START: started})
    submission = raised.value.fields.get("submission", "none")
    assert (None if submission == "none" else submission is not None) == has_submission


def test_the_local_target_is_sure_after_one_answer(context: AppContext) -> None:
    target = targets.make("local", LocalOptions())
    run = replace(RUN, folder=str(context.root), handle={})
    lookup = context.executor.perform(target.locate(run))
    assert (lookup.state, lookup.is_final) == ("absent", True)
