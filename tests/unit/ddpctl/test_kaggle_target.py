"""The verbs of the target kaggle: whole command lines, and what they make of the client's recorded answers."""

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.unit.ddpctl.kaggle_answers import DATA, answer, argv
from tests.wording import Wording

from ddpctl import config, targets
from ddpctl.command import Command, Output, T, Verb
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, NotStartedError, UnavailableError
from ddpctl.launch_plan import Plan
from ddpctl.run_status import RunStatus
from ddpctl.run_store import Run
from ddpctl.spec import JobSpec
from ddpctl.targets import LogQuery, Submission
from ddpctl.targets.kaggle import notebook as kaggle_notebook
from ddpctl.targets.kaggle.notebook import Cargo
from ddpctl.targets.kaggle.options import KaggleOptions
from ddpctl.targets.kaggle.target import _PRINT, _WRITE, KaggleTarget
from ddpwire.version import __version__

JOB = JobSpec(gpus=2, command=("ddptrain", "--recipe", "mnist-convnet"))
PLAN = Plan(run="night", job=JOB, cwd="/p", run_dir="/r/night", checkpoint_dir="/r/night/checkpoints")
KERNEL = "ann/ddpctl-night"
URL = f"https://www.kaggle.com/code/{KERNEL}"
RUN = Run(
    name="night", created=1000.0, target="kaggle", kind="kaggle", options={}, job=JOB, cwd="/p", folder="/r/night",
    checkpoint_dir=f"{KERNEL}:runs/night/checkpoints", version="0",
    handle={"kernel": KERNEL, "version": "1", "url": URL, "logs": URL},
)  # fmt: skip
OK = Output(returncode=0)
WHEEL = Output(returncode=0, stdout="d2hlZWw=\n")
STATUS = Command(argv=("kaggle", "kernels", "status", KERNEL), timeout_s=60)
LOG = Command(argv=("kaggle", "kernels", "logs", KERNEL), timeout_s=60)
SLEEP = Command(argv=("sleep", "15"), timeout_s=30)

SLOW = Output(returncode=124, stderr="no answer within 30 s")


def play(verb: Verb[T], answers: Iterable[tuple[Output, ...]]) -> tuple[list[Command], T]:
    """What a verb asks when it is sent these answers, one by one, and what it returns."""
    asked = [*next(verb)]
    try:
        for outputs in answers:
            asked += verb.send(outputs)
    except StopIteration as stop:
        return asked, stop.value
    raise AssertionError(f"it wants another answer, to {asked[-1]}")


def push(pushed: Output, plan: Plan = PLAN, options: KaggleOptions | None = None) -> tuple[list[Command], Submission]:
    target = KaggleTarget(options or KaggleOptions(owner="ann"))
    try:
        return play(target.submit(plan, attached=True), [(WHEEL,), (OK, OK), (pushed,)])
    except NotStartedError as error:
        raise error.reason from error


def test_submit_packs_itself_writes_two_files_and_pushes_them(wording: Wording) -> None:
    asked, submission = push(answer("push"))
    options, cargo = KaggleOptions(owner="ann"), Cargo(
        wheel="d2hlZWw=", wheel_name=f"ddpctl-{__version__}-py3-none-any.whl", files={}
    )  # fmt: skip
    write = ("sh", "-c", _WRITE, "ddpctl", "/r/night/kaggle")
    assert asked == [
        Command(argv=(sys.executable, "-P", "-m", "ddpctl.own_wheel"), probe=True, timeout_s=60),
        Command(argv=(*write, "night.ipynb"), stdin=kaggle_notebook.notebook(PLAN, cargo)),
        Command(argv=(*write, "kernel-metadata.json"), stdin=kaggle_notebook.metadata(PLAN, options, "ann")),
        Command(
            argv=("kaggle", "kernels", "push", "--path", "/r/night/kaggle"),
            timeout_s=300,
        ),
    ]
    assert asked[-1].argv[:-1] == argv("push")[:-1]
    assert submission == Submission(
        handle={"kernel": KERNEL, "version": "1", "url": URL, "logs": URL},
        note=submission.note,
        checkpoint_dir=f"{KERNEL}:runs/night/checkpoints",
    )
    wording(submission.note)


def test_the_owner_is_whom_the_client_is_logged_in_as_and_a_limit_is_the_sessions() -> None:
    plan = replace(PLAN, job=replace(JOB, time_limit="2h"))
    answers = [(answer("config-view"),), (WHEEL,), (OK, OK), (answer("push"),)]
    asked, _ = play(KaggleTarget(KaggleOptions()).submit(plan, attached=False), answers)
    assert asked[0] == Command(argv=argv("config-view"), probe=True, timeout_s=60)
    assert asked[-1].argv == ("kaggle", "kernels", "push", "--path", "/r/night/kaggle", "--timeout", "7200")
    assert asked[-1].argv[-2:] == argv("push-timeout")[-2:]
    assert '"id": "ann/ddpctl-night"' in (asked[-2].stdin or "")
    assert "os.environ['DDP_KAGGLE_SESSION_S'] = '7200'" in (asked[-3].stdin or "")


def test_files_are_written_where_no_client_says_whose_they_are(wording: Wording) -> None:
    for nobody in (Output(returncode=127, stderr="kaggle: not found"), answer("config-view-no-login")):
        _, (files, note) = play(KaggleTarget(KaggleOptions()).files(PLAN), [(nobody,), (WHEEL,)])
        assert list(files) == ["night.ipynb", "kernel-metadata.json"]
        assert json.loads(files["kernel-metadata.json"])["id"] == "your-name/ddpctl-night"
    wording(note)
    _, (files, note) = play(KaggleTarget(KaggleOptions()).files(PLAN), [(answer("config-view"),), (WHEEL,)])
    assert (json.loads(files["kernel-metadata.json"])["id"], note) == (KERNEL, "")


def test_a_dry_run_pushes_nothing_and_says_what_it_would_push(wording: Wording) -> None:
    plan = replace(PLAN, job=replace(JOB, command=("train.py",), time_limit="2h"))
    options = KaggleOptions(owner="ben", files=("model.py",), datasets=("a/b", "c/d"), notebooks=("e/f",))
    texts = (Output(returncode=0, stdout="import model\n"), Output(returncode=0, stdout="LAYERS = 3\n"))
    asked, submission = play(KaggleTarget(options).dry_run(plan), [(answer("config-view"),), texts, (WHEEL,), (OK,)])
    assert [command.argv for command in asked if not command.probe] == [
        ("kaggle", "kernels", "push", "--path", "/r/night/kaggle", "--timeout", "7200")
    ]
    for line in submission.table:
        wording(line)
    with pytest.raises(UnavailableError):  # as a launch
        play(KaggleTarget(options).dry_run(plan), [(Output(returncode=127, stderr="kaggle: not found"),)])


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        pytest.param("targets: {k: {kind: kaggle}}", 2, id="by default"),
        pytest.param("targets: {k: {kind: kaggle, accelerator: NvidiaTeslaP100}}", 1, id="another accelerator"),
        pytest.param("targets: {k: {kind: kaggle}}\njob: {gpus: 1}", 1, id="the file's own"),
    ],
)
def test_both_t4s_are_used_by_default(words: str, gpus: int, tmp_path: Path) -> None:
    file = tmp_path / "ddpctl.yaml"
    file.write_text(f"target: k\n{words}\n")
    load = partial(config.load, file=file, profile=None, target=None, kinds=targets.kinds())
    assert load(overrides={}).job.gpus == gpus
    assert load(overrides={"gpus": "1"}).job.gpus == 1
    assert config.load(file=None, profile=None, target="local", overrides={}, kinds=targets.kinds()).job.gpus == 1


def test_a_script_and_its_files_travel_in_cells(wording: Wording) -> None:
    plan = replace(PLAN, job=replace(JOB, command=("train.py", "--lr", "0.1"), max_restarts=0, hang_timeout=900))
    options = KaggleOptions(owner="ann", files=("model.py",), wheel="ann/ddpctl-wheel")
    texts = (Output(returncode=0, stdout="import model\n"), Output(returncode=0, stdout="LAYERS = 3\n"))
    asked, _ = play(KaggleTarget(options).submit(plan, attached=False), [texts, (OK, OK), (answer("push"),)])
    assert asked[:2] == [Command(argv=("cat", name), cwd="/p", probe=True) for name in ("train.py", "model.py")]
    notebook = asked[2].stdin or ""
    assert r'"source": "%%writefile train.py\nimport model"' in notebook
    assert r'"source": "%%writefile model.py\nLAYERS = 3"' in notebook
    assert r"launch('train.py', gpus=gpus, args=args, name='night', max_restarts=0, hang_timeout=900)" in notebook
    assert r'"source": "gpus = 2\nargs = [\"--lr\", \"0.1\"]"' in notebook
    assert '"ann/ddpctl-wheel"' in (asked[3].stdin or "")
    for gone, kind in ((Output(returncode=1), NoInputError), (SLOW, UnavailableError)):
        with pytest.raises(NotStartedError) as raised:
            play(KaggleTarget(options).submit(plan, attached=False), [(texts[0], gone)])
        assert type(raised.value.reason) is kind
        wording(raised.value)
    for files in (("model.py",), ()):
        with pytest.raises(ConfigError) as refused:
            KaggleTarget(replace(options, files=files)).render(plan)
        wording(refused.value)


def test_a_resumed_run_has_the_former_notebooks_output_among_its_inputs() -> None:
    plan = replace(PLAN, run="night-2", run_dir="/r/night-2", checkpoint_dir=RUN.checkpoint_dir)
    asked, submission = push(answer("push"), plan)
    assert '"kernel_sources": [\n  "ann/ddpctl-night"\n ]' in (asked[-2].stdin or "")
    assert r"args=args, name='night-2', resume=True)" in (asked[-3].stdin or "")
    assert submission.checkpoint_dir == "ann/ddpctl-night-2:runs/night-2/checkpoints"


@pytest.mark.parametrize("line", (DATA / "refusals.txt").read_text().splitlines())
def test_why_a_push_is_refused(line: str) -> None:
    name, error, sentence = line.split(" | ")
    with pytest.raises(DdpctlError) as raised:
        push(answer(f"push-{name}"))
    assert type(raised.value).__name__ == error
    assert str(raised.value) == f"cannot push {KERNEL}: {sentence}"
    assert isinstance(raised.value.__cause__, NotStartedError)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param("Phone verification is required to use GPUs.", id="phone"),
        pytest.param("Maximum batch CPU sessions reached", id="sessions"),
        pytest.param("Something new", id="unknown"),
    ],
)
def test_what_was_not_recorded_is_known_by_its_words(said: str, wording: Wording) -> None:
    with pytest.raises(DdpctlError) as raised:
        push(Output(returncode=0, stdout=f"Kernel push error: {said}\n"))
    wording(raised.value)


def test_without_a_client_or_with_a_slow_one_or_nobody_logged_in(wording: Wording) -> None:
    for output in (
        Output(returncode=127, stderr="kaggle: not found"),
        Output(returncode=124, stderr="no answer within 300 s"),
    ):
        with pytest.raises(UnavailableError) as raised:
            push(output)
        wording(raised.value)
    with pytest.raises(NotStartedError) as not_started:
        play(KaggleTarget(KaggleOptions()).submit(PLAN, attached=False), [(answer("config-view-no-login"),)])
    assert isinstance(not_started.value.reason, UnavailableError)
    wording(not_started.value)


def test_an_input_that_kaggle_does_not_know_is_named_since_the_push_goes_through(wording: Wording) -> None:
    _, submission = push(answer("push-invalid-dataset"))
    (line,) = submission.table
    assert "'ann/no-such'" in line
    wording(line)


def status(said: str, log: Output | None = None) -> RunStatus:
    answers = [(answer(said),), *([(log,)] if log else [])]
    asked, (found,) = play(KaggleTarget(KaggleOptions()).status((RUN,), now=2000), answers)
    assert asked == [STATUS, LOG][: len(answers)]
    assert STATUS.argv == argv(said)
    return found


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("queued", "pending"),
        ("new_script", "pending"),
        ("running", "running"),
        ("cancel_requested", "stopping"),
        ("cancel_acknowledged", "stopped"),
    ],
)
def test_every_state_of_a_session_that_goes_on_or_was_cancelled(word: str, state: str, wording: Wording) -> None:
    found = status(f"status-{word}")
    assert (found.state, found.code) == (state, 143 if state == "stopped" else None)
    wording(found.message)


def test_how_a_session_ended_is_in_its_log(wording: Wording) -> None:
    found = status("status-complete", answer("logs"))
    assert (found.state, found.code) == ("succeeded", 0)
    wording(found.message)
    line = 'ddpctl outcome {"code": 143, "cause": "stopped", "message": "stopped by SIGTERM"}\n'
    stopped = json.dumps([{"stream_name": "stdout", "time": 1.0, "data": line}])
    found = status("status-complete", Output(returncode=0, stdout=stopped))
    assert (found.state, found.code, found.message) == ("stopped", 143, "stopped by SIGTERM")
    found = status("status-error", answer("logs-name-error"))
    assert (found.state, found.code) == ("failed", 1)
    wording(found.message)
    found = status("status-error-memory", answer("logs-404"))
    wording(found.message)
    assert status("status-error-memory", answer("logs-name-error")).message == found.message, "Kaggle knows better"
    wording(status("status-error-timeout", answer("logs-404")).message)
    wording(status("status-complete", answer("logs-404")).message)


@pytest.mark.parametrize("code", ["403", "404"])
def test_a_notebook_that_is_gone(code: str, wording: Wording) -> None:
    found = status(f"status-{code}")
    assert (found.state, found.code) == ("lost", 66)
    wording(found.message)


def test_logs_wait_for_the_session_and_for_its_end(wording: Wording) -> None:
    target = KaggleTarget(KaggleOptions())
    follow = Command(argv=argv("logs-follow"), mode="stream", timeout_s=None)
    answers = [
        (answer("status-queued"),), (OK,), (answer("status-running"),), (OK,), (answer("status-running"),), (OK,),
        (answer("status-complete"),), (answer("logs"),),
    ]  # fmt: skip
    asked, _ = play(target.logs(RUN, LogQuery(follow=True)), answers)
    assert asked == [STATUS, SLEEP, STATUS, follow, STATUS, SLEEP, STATUS, LOG]
    printed = Command(
        argv=("sh", "-c", _PRINT, sys.executable, KERNEL, "--tail=5", "--rank=1"), mode="stream", timeout_s=None
    )
    asked, _ = play(target.logs(RUN, LogQuery(tail=5, ranks=(1,))), [(OK,)])
    assert asked == [printed]
    with pytest.raises(UnavailableError) as raised:
        play(target.logs(RUN, LogQuery()), [(Output(returncode=1),)])
    wording(raised.value)
    with pytest.raises(ConfigError) as refused:
        play(target.logs(RUN, LogQuery(follow=True, nodes=(0,))), [(answer("status-running"),)])
    wording(refused.value)
    answers = [(answer("status-complete"),), (answer("logs"),), (OK,)]
    asked, _ = play(target.logs(RUN, LogQuery(follow=True, ranks=(1,))), answers)
    assert asked[-1].argv[-1] == "--rank=1", "after the end, the lines are chosen"


def test_stop_pull_and_exec(wording: Wording) -> None:
    target = KaggleTarget(KaggleOptions())
    for signal in ("TERM", "KILL"):
        with pytest.raises(UnavailableError) as raised:
            play(target.stop(RUN, signal=signal), [])
        wording(raised.value)
    assert play(target.stop(replace(RUN, handle={}), signal="KILL"), [()]) == ([], True)
    (asked,), _ = play(target.pull(RUN, "/out"), [(answer("output"),)])
    assert (asked.argv, asked.timeout_s) == (argv("output"), 3600)
    with pytest.raises(NoInputError):
        play(target.pull(RUN, "/out"), [(answer("logs-404"),)])
    with pytest.raises(ConfigError) as refused:
        target.execute(RUN, node=0, argv=("ls",), tty=False)
    wording(refused.value)
