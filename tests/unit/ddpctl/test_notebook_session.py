"""What a cell shows of its run, and which earlier run it continues from."""

import contextlib
import linecache
import pickle
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.messages import assert_names, refused
from tests.unit.ddpctl.records import run_of

from ddpctl import notebook
from ddpctl.errors import ConfigError, UsageError
from ddpctl.execution.executor import Executor
from ddpctl.job.launch_plan import Request
from ddpctl.job.spec import JobSpec
from ddpctl.notebook import rank_main, serialization, session
from ddpctl.notebook.progress import Progress, curve, last_attempts, summary
from ddpctl.notebook.session import Program, Tail
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus
from ddpctl.runs.run_store import Run
from ddpwire.history import HEADER, HISTORY, line, read_history
from ddpwire.run_files import Outcome


def test_a_bar_reaches_the_cell_as_it_comes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "node.log"
    tail = Tail(log)
    tail.pass_on()
    for text in ("a line\n", "\r[node0 rank0]  45%|█", "\r[node0 rank0]  46%|█"):
        with log.open("a") as file:
            file.write(text)
        tail.pass_on()
        assert capsys.readouterr().out == text
    tail.end_line()
    tail.close()
    assert capsys.readouterr().out == "\n"


def write_run(root: Path, name: str, created: float, program: Program | None = None, **fields: Any) -> None:
    """A run of a function, or with a command in ``fields``."""
    handle = {session.FUNCTION: program.name, session.SOURCE: program.source} if program else {}
    command = fields.pop("command", ("train",))
    values = {"cwd": str(root), "folder": str(root / name), "handle": handle} | fields
    (root / name).mkdir(parents=True)
    run_store.save(run_of(name, created=created, job=JobSpec(command=command), **values))


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppContext:
    monkeypatch.chdir(tmp_path)
    for name in ("JPY_SESSION_NAME", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return AppContext(executor=Executor({}), root=tmp_path, emit=print)


def test_a_run_whose_checkpoints_are_not_here_is_refused(context: AppContext, tmp_path: Path) -> None:
    write_run(tmp_path, "night", 1.0, kind="slurm")
    elsewhere = {"handle": {"logs": "hpc:/runs/night"}, "checkpoint_dir": "/runs/night/c"}
    run_store.save(replace(run_store.load(tmp_path, "night"), **elsewhere))
    with refused(UsageError, "resume='night'", "/runs/night/c"):
        session._resumed(context, "night", Program("train()", ""))
    with refused(UsageError, "lambda"):
        session._resumed(context, True, session.program_of(lambda: None))


def test_a_run_that_goes_on_is_not_continued(context: AppContext, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(context.root, "night", 1.0)
    looked: list[str] = []
    monkeypatch.setattr(session.launcher, "check_alone", lambda _, run: looked.append(run.name))
    assert session._resumed(context, "night", Program("train()", "")) is not None
    assert looked == ["night"]


FIELDS: dict[str, Any] = {
    "gpus": 2,
    "ranks": None,
    "device": "cpu",
    "env": {},
    "max_restarts": None,
    "hang_timeout": None,
    "time_limit": None,
    "grace": 30.0,
}


def test_the_arguments_of_launch_become_a_job() -> None:
    job = session._job("My_fit.py", ("--lr", 0.1), {}, {**FIELDS, "ranks": 1, "env": {"LR": "1"}, "time_limit": "2h"})
    assert job == JobSpec(
        name="my-fit",
        command=("My_fit.py", "--lr", "0.1"),
        gpus=2,
        ranks=1,
        device="cpu",
        env={"LR": "1"},
        time_limit="2h",
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "fields", "fact"),
    [("Night", {}, {}, "'Night'"), (None, {"a": 1}, {}, "kwargs"), (None, {}, {"gpus": 3, "ranks": 2}, "gpus (3")],
)
def test_arguments_that_cannot_be_are_refused(
    name: str | None, kwargs: dict[str, int], fields: dict[str, Any], fact: str, context: AppContext
) -> None:
    with refused(UsageError, "launch", fact):
        session.run("train.py", args=(), kwargs=kwargs, name=name, resume=False, **FIELDS | fields)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_cell_follows_its_function_and_leaves_only_its_record(
    interrupted: bool, context: AppContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, events = context.root / "runs", list[str]()
    answers = iter([KeyboardInterrupt(), KeyboardInterrupt(), None, None] if interrupted else [None])

    def called(event: str) -> None:
        events.append(event)
        if error := next(answers, None):
            raise error

    class Stopper:
        times = 0

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __call__(self) -> None:
            self.times += 1
            with (root / "night/node-0/node.log").open("a") as log:
                log.write(", saved")
            called("stop")

    def started(_: AppContext, request: Request, *, attached: bool) -> Run:
        write_run(root, "night", 1.0)
        (root / "night/node-0").mkdir()
        write(root / "night/node-0", row(90, loss=1.0))
        for name, text in (("node.log", "half a line"), ("outcome.json", "{}")):
            (root / "night/node-0" / name).write_text(text)
        Path(request.job.command[-1]).with_name("result.pkl").write_bytes(pickle.dumps(7))
        return run_store.load(root, "night")

    def status(*_: object) -> tuple[RunStatus, ...]:
        called("status")
        return (RunStatus(run="night", state="succeeded", message="", code=0),)

    def executor(environ: Mapping[str, str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(reap=lambda: events.append(environ["MPLBACKEND"]))

    monkeypatch.setattr(session, "_executor", session._executor.__wrapped__)
    monkeypatch.setattr(session, "Executor", executor)
    for name, function in (("start", started), ("status", status), ("Stopper", Stopper)):
        monkeypatch.setattr(session.launcher, name, function)
    with pytest.raises(KeyboardInterrupt) if interrupted else contextlib.nullcontext():
        assert session.run(countdown, args=(1,), kwargs={}, name=None, resume=False, **FIELDS) == 7
    assert events == [*(["status", "stop", "stop"] if interrupted else []), "status", "agg"]
    assert sorted(path.name for path in root.iterdir()) == ["night"], "without the call"
    assert session.program_of_run(run_store.load(root, "night")) == session.program_of(countdown)
    printed = capsys.readouterr().out
    assert ("half a line\n" in printed, "step 90   loss 1.0000\n" in printed) == (True, True)


def test_a_session_of_kaggle_needs_its_gpus_and_prints_its_end(
    context: AppContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert session._job("train.py", (), {}, FIELDS | {"device": None}).device == "cuda"
    outcome = Outcome(code=3, cause="error", message="it failed")
    session._print_end(context, run_of(), RunStatus(run="night", state="failed", message="", code=3, outcome=outcome))
    error = ConfigError("too few", hint="use fewer", gpus_needed=2)
    monkeypatch.setattr(session.launcher, "start", Mock(side_effect=error))
    with refused(ConfigError):
        session._start(context, Mock())
    assert_names(error.hint, "GPU T4 x2")
    assert 'ddpctl outcome {"code": 3, "cause": "error", "message": "it failed"}\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cause", "code", "fails"), [("stopped", 143, False), ("stopped", 130, True), ("error", 1, True)]
)
def test_a_run_fails_with_the_error_of_its_rank_unless_it_has_saved_at_its_deadline(
    cause: str, code: int, fails: bool, tmp_path: Path
) -> None:
    story = {"message": "X", "cell": "Cell In[3]", "line": 7, "traceback": "", "original": pickle.dumps(KeyError("a"))}
    (tmp_path / "failure-rank-1.pkl").write_bytes(pickle.dumps(story))
    outcome = Outcome(code=code, cause=cause, message="", rank=1)
    state = RunStatus(run="night", state="failed", message="", code=code, outcome=outcome)
    with pytest.raises(notebook.RankError) if fails else contextlib.nullcontext() as raised:
        session._judge(run_of(), state, tmp_path)
    if raised is not None:
        assert (raised.value.cell, raised.value.line, type(raised.value.__cause__)) == ("Cell In[3]", 7, KeyError)


def countdown(number: int) -> int:
    return 0 if number == 0 else countdown(number - 1)


@pytest.mark.parametrize(
    ("rank", "number", "code", "made"),
    [(0, 3, 0, {"result.pkl"}), (1, 3, 0, set()), (1, "three", 1, {"failure-rank-1.pkl"})],
)
def test_a_rank_calls_the_function_and_rank_0_alone_returns_its_result(
    rank: int, number: Any, code: int, made: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(countdown, "__module__", "__main__")
    monkeypatch.setattr(sys, "path", ["/added", *sys.path])
    (tmp_path / "call.pkl").write_bytes(serialization.pack(countdown, (number,), {}))
    monkeypatch.setattr(sys, "path", sys.path[1:])
    monkeypatch.setattr(sys, "argv", ["rank_main", str(tmp_path / "call.pkl")])
    monkeypatch.setattr(linecache, "cache", {})
    monkeypatch.setenv("RANK", str(rank))
    assert (rank_main.main(), "/added" in sys.path) == (code, True)
    assert {path.name for path in tmp_path.glob("*.pkl")} == {"call.pkl", *made}
    assert __file__ in linecache.cache, "a traceback has the lines of cells"


def test_a_tensor_on_a_gpu_and_a_large_call_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        device = SimpleNamespace(type="cuda")

    monkeypatch.setattr(serialization, "LARGE_BYTES", 10)
    with refused(ConfigError, "countdown()", "MB"):
        serialization.pack(countdown, (1,), {})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, nn=SimpleNamespace(Module=())))
    with refused(ConfigError, "countdown()", "args[0].cpu()"):
        serialization.pack(countdown, (Tensor(),), {})


def row(step: int, **values: float) -> dict[str, float]:
    names = {"loss": "ddp_loss", "planned": "ddp_planned_steps", "samples": "ddp_samples_total"}
    return {"time": 1000.0 + step, "ddp_last_step": step, **{names[name]: value for name, value in values.items()}}


def write(folder: Path, *rows: dict[str, float]) -> None:
    (folder / HISTORY).write_text("\n".join([HEADER, *(line(values["time"], values) for values in rows), ""]))


class Cell:
    """In the place of IPython's display function and of the output that it returns."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []

    def __call__(self, data: dict[str, str], **options: object) -> "Cell":
        self.update(data, **options)
        return self

    def update(self, data: dict[str, str], **options: object) -> None:
        assert options["raw"] is True
        self.outputs.append(data)


@pytest.mark.parametrize("reports", [True, False])
def test_the_last_picture_is_the_runs_end_and_a_run_that_reports_nothing_has_none(
    tmp_path: Path, reports: bool
) -> None:
    cell = Cell()
    progress = Progress(tmp_path, cell)
    progress.update()  # there is no history yet
    rows = [row(30, loss=2.0), row(90, loss=1.0)] if reports else [{"time": 1000.0}] * 2
    write(tmp_path, *rows[:1])
    progress.update()  # it is not time yet
    write(tmp_path, *rows)
    progress.update(last=True)
    assert [output["text/plain"] for output in cell.outputs] == ["step 90   loss 1.0000"] * reports
    (tmp_path / HISTORY).write_bytes(b"\xff")  # it is being written
    progress.update(last=True)
    assert len(cell.outputs) == 2 * reports
    resumed = curve([row(80, loss=2.0), row(90, loss=1.0)])
    assert resumed is not None
    assert resumed["steps"][0][1] == "80", "it has no values before"


def test_the_line_says_how_far_it_is() -> None:
    rows = read_history("\n".join([HEADER, line(1000.0, row(10, samples=100)), line(1002.0, row(20, samples=300))]))
    assert summary(last_attempts(rows)) == "step 20   100 samples/s"
    assert summary([row(20, planned=90, loss=0.5)]) == "step 20 of 90   loss 0.5000"


def test_a_cell_shows_the_curve_above_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpctl.notebook.progress.summary", lambda _: "step 20 <of> 90")
    cell = Cell()
    write(tmp_path, row(10, loss=2.0), row(20, loss=1.0))
    Progress(tmp_path, cell).update(last=True)
    (output,) = cell.outputs
    assert output["text/plain"] == "step 20 <of> 90"
    picture, _, text = output["text/html"].partition("</svg>")
    assert picture.count("<polyline") == 1
    assert text.strip() == "<pre>step 20 &lt;of&gt; 90</pre>"


LAUNCH = """
def launch():
    try:
        raise ValueError("X")
    except ValueError as error:
        raise as_the_caller_sees(error)
"""


def test_an_error_shows_no_frame_of_the_notebook_package() -> None:
    own = str(Path(notebook.__file__).with_name("session.py"))
    names: dict[str, Any] = {"as_the_caller_sees": notebook.as_the_caller_sees}
    exec(compile(LAUNCH, own, "exec"), names)  # noqa: S102
    with pytest.raises(ValueError, match="X") as raised:
        names["launch"]()
    lines = raised.value._render_traceback_()  # type: ignore[attr-defined]
    assert [own in "".join(lines), __file__ in "".join(lines)] == [False, True]
