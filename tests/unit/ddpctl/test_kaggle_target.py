"""The verbs of the target kaggle: whole command lines, and what follows from the client's recorded answers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.messages import refused
from tests.unit.ddpctl.answers import OK, Answer, only, perform
from tests.unit.ddpctl.kaggle_answers import DATA, answer, argv
from tests.unit.ddpctl.records import run_of

from ddpctl.command import Command, Output, write_file
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError, UsageError
from ddpctl.job.launch_plan import Plan
from ddpctl.job.spec import JobSpec
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.kaggle import notebook as kaggle_notebook
from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import KaggleTarget, selected

JOB = JobSpec(gpus=2, command=("ddptrain", "--recipe", "mnist-convnet"))
PLAN = Plan(name="night", job=JOB, cwd="/p", folder="/r/night", checkpoint_dir="/r/night/checkpoints")
KERNEL = "ann/ddpctl-night"
URL = f"https://www.kaggle.com/code/{KERNEL}"
HANDLE = {"kernel": KERNEL, "version": "1", "url": URL, "logs": URL}
RUN = run_of(kind="kaggle", job=JOB, checkpoint_dir=f"{KERNEL}:runs/night/checkpoints", handle=HANDLE)
STATUS = Command(argv=("kaggle", "kernels", "status", KERNEL), timeout_s=60)
LOG = Command(argv=("kaggle", "kernels", "logs", KERNEL), timeout_s=60)
SLEEP = Command(argv=("sleep", "15"), timeout_s=30)
SLOW = Output(returncode=124, stderr="no answer within 30 s")
NO_CLIENT = Output(returncode=127, stderr="kaggle: not found")
WHEEL, VIEW, PUSH = "ddpctl.files.own_wheel", "kaggle config view", "kernels push"
METADATA = "kernel-metadata.json"
# What the client and this machine answer, by a part of the command line.
ANSWERS: Mapping[str, Answer] = {
    WHEEL: Output(returncode=0, value="d2hlZWw="),
    VIEW: answer("config-view"),
    PUSH: answer("push"),
    "cat train.py": Output(returncode=0, stdout="import model\n"),
    "cat model.py": Output(returncode=0, stdout="LAYERS = 3\n"),
}
SCRIPT = replace(PLAN, job=replace(JOB, command=("train.py", "--lr", "0.1"), max_restarts=0, hang_timeout=900))


ONE_RANK = replace(RUN, job=replace(JOB, gpus=1))


def push(
    pushed: Output | None = None, plan: Plan = PLAN, *, commands: list[Command] | None = None, **options: Any
) -> tuple[list[Command], Submission]:
    target = KaggleTarget(KaggleOptions(**{"owner": "ann", **options}))
    answers = {**ANSWERS, PUSH: pushed or ANSWERS[PUSH]}
    return perform(target.submit(plan, attached=True), answers, commands)


def written(commands: list[Command], name: str) -> str:
    """The text of a file that is written into the notebook's folder."""
    (text,) = [command.stdin or "" for command in commands if command.argv[-1].endswith(f"/{name}")]
    return text


def refusal_of(pushed: Output) -> DdpctlError:
    """The reason why nothing was started."""
    with pytest.raises(DdpctlError) as error:
        push(pushed)
    assert "submission" not in error.value.fields
    return error.value


def test_submit_packs_its_wheel_writes_two_files_and_pushes_them() -> None:
    commands, submission = push()
    options = KaggleOptions(owner="ann")
    assert (WHEEL in commands[0].argv[0], commands[0].probe) == (True, True)
    assert commands[1:] == [
        write_file("/r/night/kaggle/night.ipynb", kaggle_notebook.notebook(PLAN, wheel="d2hlZWw=")),
        write_file("/r/night/kaggle/kernel-metadata.json", kaggle_notebook.metadata(PLAN, options, "ann")),
        Command(argv=("kaggle", "kernels", "push", "--path", "/r/night/kaggle"), timeout_s=300, starts=True),
    ]
    assert commands[-1].argv[:-1] == argv("push")[:-1]
    assert "'export', '--best'" in written(commands, "night.ipynb"), "only of what ddptrain has trained"
    assert "'export', '--best'" not in written(push(plan=SCRIPT)[0], "night.ipynb")
    assert submission == Submission(
        handle=HANDLE,
        note=submission.note,
        checkpoint_dir=f"{KERNEL}:runs/night/checkpoints",
    )
    assert f"1 of {KERNEL}" in submission.note


def test_the_owner_is_the_user_of_the_client_and_a_time_limit_is_the_sessions() -> None:
    commands, _ = push(plan=replace(PLAN, job=replace(JOB, time_limit="2h")), owner=None)
    pushed = only(commands, PUSH)
    assert only(commands, VIEW) == Command(argv=argv("config-view"), probe=True, timeout_s=60)
    assert pushed.argv == ("kaggle", "kernels", "push", "--path", "/r/night/kaggle", "--timeout", "7200")
    assert pushed.argv[-2:] == argv("push-timeout")[-2:]
    assert '"id": "ann/ddpctl-night"' in written(commands, "kernel-metadata.json")
    assert "os.environ['DDP_KAGGLE_SESSION_S'] = '7200'" in written(commands, "night.ipynb")


NOBODY = (NO_CLIENT, answer("config-view-no-login"), Output(returncode=0, stdout="- username: None\n"))


@pytest.mark.parametrize("nobody", NOBODY, ids=["no client", "nobody is logged in", "no name"])
def test_files_of_an_unknown_owner_have_a_placeholder_that_the_note_explains(nobody: Output) -> None:
    _, (files, note) = perform(KaggleTarget(KaggleOptions()).files(PLAN), {**ANSWERS, VIEW: nobody})
    assert list(files) == ["night.ipynb", "kernel-metadata.json"]
    assert json.loads(files["kernel-metadata.json"])["id"] == "your-name/ddpctl-night"
    assert all(fact in note for fact in ("your-name", "kernel-metadata.json", "`owner`"))


def test_a_dry_run_pushes_nothing_and_shows_what_it_would_push() -> None:
    plan = replace(SCRIPT, job=replace(SCRIPT.job, time_limit="2h"))
    options = KaggleOptions(owner="ben", files=("model.py",), datasets=("a/b", "c/d"), notebooks=("e/f",))
    commands, submission = perform(KaggleTarget(options).dry_run(plan), ANSWERS)
    (shown,) = [command for command in commands if not command.probe]  # the executor prints it in a dry run
    assert shown.argv == ("kaggle", "kernels", "push", "--path", "/r/night/kaggle", "--timeout", "7200")
    folder, notebook, metadata = submission.table
    assert "/r/night/kaggle" in folder
    assert all(fact in notebook for fact in ("night.ipynb", "train.py", "model.py", "1 node x 2 ranks"))
    facts = ("kernel-metadata.json", "ben/ddpctl-night", "NvidiaTeslaT4", "a/b, c/d", "e/f")
    assert all(fact in metadata for fact in facts)


def test_a_script_and_its_files_travel_in_cells() -> None:
    commands, _ = push(plan=SCRIPT, files=("model.py",), wheel="ann/ddpctl-wheel")
    assert commands[:2] == [Command(argv=("cat", name), cwd="/p", probe=True) for name in ("train.py", "model.py")]
    notebook = written(commands, "night.ipynb")
    assert r'"source": "%%writefile train.py\nimport model"' in notebook
    assert r'"source": "%%writefile model.py\nLAYERS = 3"' in notebook
    assert r"launch('train.py', gpus=gpus, args=args, name='night', max_restarts=0, hang_timeout=900)" in notebook
    assert r'"source": "gpus = 2\nargs = [\"--lr\", \"0.1\"]"' in notebook
    assert '"ann/ddpctl-wheel"' in written(commands, "kernel-metadata.json")


@pytest.mark.parametrize(
    ("output", "kind"), [(Output(returncode=1), NoInputError), (SLOW, UnavailableError)], ids=["missing", "slow disk"]
)
def test_a_file_that_cannot_be_read_is_named_and_nothing_is_pushed(output: Output, kind: type[DdpctlError]) -> None:
    target = KaggleTarget(KaggleOptions(owner="ann", files=("model.py",)))
    commands: list[Command] = []
    with pytest.raises(kind) as error:
        perform(target.submit(SCRIPT, attached=False), {**ANSWERS, "cat model.py": output}, commands)
    assert [command for command in commands if not command.probe] == []
    assert "model.py" in str(error.value)
    assert "/p" in str(error.value)
    with refused(ConfigError, "model.py"):  # it would be a magic
        perform(target.submit(SCRIPT, attached=False), {**ANSWERS, "cat model.py": replace(OK, stdout="%%bash\n")})
    commands = []
    with refused(UnavailableError, "/r/night/kaggle"):
        perform(target.submit(PLAN, attached=False), {**ANSWERS, METADATA: Output(returncode=1)}, commands)
    assert [command for command in commands if command.starts] == []


def test_a_resumed_run_has_the_former_notebooks_output_among_its_inputs() -> None:
    plan = replace(PLAN, name="night-2", folder="/r/night-2", checkpoint_dir=RUN.checkpoint_dir)
    commands, submission = push(plan=plan)
    assert '"kernel_sources": [\n  "ann/ddpctl-night"\n ]' in written(commands, "kernel-metadata.json")
    assert r"args=args, name='night-2', resume=True)" in written(commands, "night-2.ipynb")
    assert submission.checkpoint_dir == "ann/ddpctl-night-2:runs/night-2/checkpoints"


@pytest.mark.parametrize("line", (DATA / "refusals.txt").read_text().splitlines())
def test_a_refused_push_has_its_type_and_what_to_do(line: str) -> None:
    name, kind, *facts = line.split(" | ")
    reason = refusal_of(answer(f"push-{name}"))
    assert type(reason).__name__ == kind
    assert [fact for fact in [KERNEL, *facts] if fact not in str(reason)] == []


@pytest.mark.parametrize(
    "pushed",
    [
        Output(returncode=124, stderr="no answer within 300 s"),
        Output(returncode=1, stderr="HTTPSConnectionPool(host='www.kaggle.com', port=443): Read timed out."),
        Output(returncode=0, stdout="Something new"),
        Output(returncode=-9),
    ],
    ids=["no answer", "read timed out", "other client", "killed client"],
)
def test_a_push_whose_reply_is_lost_may_have_started_a_session(pushed: Output) -> None:
    with pytest.raises(UnavailableError) as error:
        push(pushed)
    assert error.value.fields == {"submission": None}


@pytest.mark.parametrize(
    ("answered", "state", "kernel"),
    [
        (answer("status-running"), "exists", KERNEL),
        (answer("status-404"), "absent", None),
        (Output(returncode=124), "unknown", None),
    ],
)
def test_a_notebook_is_located_by_its_name(answered: Output, state: str, kernel: str | None) -> None:
    target = KaggleTarget(KaggleOptions(owner="ann"))
    _, presence = perform(target.locate(replace(RUN, handle={})), {"kernels status": answered})
    assert (presence.state, presence.handle.get("kernel")) == (state, kernel)


def test_a_client_that_is_not_logged_in_starts_nothing() -> None:
    verb = KaggleTarget(KaggleOptions()).submit(PLAN, attached=False)
    commands: list[Command] = []
    with pytest.raises(UnavailableError, match="kaggle auth login"):
        perform(verb, {**ANSWERS, VIEW: answer("config-view-no-login")}, commands)
    assert not any(command.starts for command in commands)


LINE = 'ddpctl outcome {"code": 143, "cause": "stopped", "message": "stopped by SIGTERM"}\n'
STOPPED = Output(returncode=0, stdout=json.dumps([{"stream_name": "stdout", "time": 1.0, "data": LINE}]))


@pytest.mark.parametrize(
    ("session", "log", "state", "code", "fact"),
    [
        ("queued", None, "pending", None, ""),
        ("running", None, "running", None, ""),
        ("cancel_requested", None, "stopping", None, ""),
        ("cancel_acknowledged", None, "stopped", 143, ""),
        ("403", None, "lost", 66, KERNEL),
        ("complete", answer("logs"), "succeeded", 0, "every rank exited with 0"),
        ("complete", STOPPED, "stopped", 143, "stopped by SIGTERM"),
        ("complete", answer("logs-404"), "succeeded", 0, ""),
        ("error", answer("logs-name-error"), "failed", 1, "NameError: name 'lauch' is not defined"),
        ("error-memory", answer("logs-name-error"), "failed", 1, "allocate more memory than is available"),
        ("error-timeout", answer("logs-404"), "failed", 1, "max allowed execution duration"),
    ],
)
def test_a_session_has_its_state_and_its_end_is_in_its_log_unless_kaggle_names_the_cause(
    session: str, log: Output | None, state: str, code: int | None, fact: str
) -> None:
    answers = {"kernels status": answer(f"status-{session}"), "kernels logs": log or OK}
    commands, (run,) = perform(KaggleTarget(KaggleOptions()).status((RUN,), now=2000), answers)
    assert commands == ([STATUS, LOG] if log else [STATUS])
    assert STATUS.argv == argv(f"status-{session}")
    assert (run.state, run.code, fact in run.message) == (state, code, True)


def follow(query: LogQuery, *sessions: str) -> list[Command]:
    """The commands that follow the log of a session, which has these states when it is asked for them."""
    states = iter(sessions)
    answers: dict[str, Answer] = {
        "kernels status": lambda _: answer(f"status-{next(states)}"),
        "kernels logs": lambda command: OK if command.mode == "stream" else answer("logs"),
    }
    commands, _ = perform(KaggleTarget(KaggleOptions()).logs(RUN, query), answers)
    return commands


def test_followed_logs_wait_for_the_beginning_and_the_end_of_the_session() -> None:
    commands = follow(LogQuery(follow=True), "queued", "running", "running", "complete")
    stream = Command(argv=argv("logs-follow"), mode="stream", timeout_s=None)
    assert commands == [STATUS, SLEEP, STATUS, stream, STATUS, SLEEP, STATUS, LOG]
    with refused(ConfigError, "--rank"):
        follow(LogQuery(follow=True, ranks=(1,)), "running")
    away, _ = perform(KaggleTarget(KaggleOptions()).logs(RUN, LogQuery(follow=True)), {"kernels status": SLOW})
    assert (away.count(STATUS), away.count(stream)) == (12, 1), "after six tries without an answer it goes on"


def test_logs_of_a_rank_are_chosen_from_the_whole_log() -> None:
    target = KaggleTarget(KaggleOptions())
    lines = "[node0 rank0] a\n[node0 rank1] b\n[node0] c\n[node0 rank1] d"
    commands, _ = perform(
        target.logs(RUN, LogQuery(tail=1, ranks=(1,))), {"kernels logs": Output(returncode=0, stdout=lines)}
    )
    printed = Command(argv=("cat",), stdin="[node0 rank1] d\n", mode="stream", timeout_s=None)
    assert commands == [replace(LOG, timeout_s=3600), printed]
    alone, _ = perform(target.logs(ONE_RANK, LogQuery(ranks=(0,))), {"kernels logs": replace(OK, stdout="a\n")})
    assert alone[-1].stdin == "a\n", "the lines of a single rank have no prefix"
    assert selected(lines, LogQuery(nodes=(0,))) == f"{lines}\n"
    assert selected(lines, LogQuery(nodes=(1,))) == selected(lines, LogQuery(tail=0)) == ""
    assert selected(json.dumps([{"data": "a\nb"}, {"data": "c"}]), LogQuery(tail=2)) == "a\nbc\n"
    with pytest.raises(UnavailableError, match="ddpctl status night"):
        perform(target.logs(RUN, LogQuery()), {"kernels logs": Output(returncode=1)})


@pytest.mark.parametrize("signal", ["TERM", "KILL"])
def test_stop_runs_nothing_and_names_the_page_on_which_to_cancel(signal: Any) -> None:
    commands: list[Command] = []
    with pytest.raises(UnavailableError, match=URL):
        perform(KaggleTarget(KaggleOptions()).stop(RUN, signal=signal), {}, commands)
    assert commands == []


def test_pull_downloads_the_output() -> None:
    target = KaggleTarget(KaggleOptions())
    (command,), _ = perform(target.pull(RUN, "/out"), {"kernels output": answer("output")})
    assert (command.argv, command.timeout_s) == (argv("output"), 3600)
    with pytest.raises(NoInputError):
        perform(target.pull(RUN, "/out"), {"kernels output": answer("logs-404")})
    with refused(UsageError, "--best"):
        perform(target.pull(RUN, "/out", best=True), {})
    options = KaggleOptions()
    assert (options.job_defaults, [*options.problems(JOB)]) == ({"gpus": 2}, [])
    assert [key for key, _ in options.problems(replace(JOB, time_limit="11m"))] == ["job.time_limit"]
