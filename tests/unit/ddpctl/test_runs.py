"""What the verbs for a run ask its target for: which node, log and files; and the state of a run after a stop."""

import fcntl
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from tests.messages import refused
from tests.unit.ddpctl.answers import only, perform
from tests.unit.ddpctl.test_run_status import machine, silent
from tests.unit.ddpctl.test_run_store import make

from ddpctl.command import Command, Output
from ddpctl.commands import explain, runs
from ddpctl.diagnosis.explain import Explanation
from ddpctl.errors import ConfigError, DdpctlError, NoInputError, UnavailableError
from ddpctl.job.spec import JobSpec
from ddpctl.operations import launcher
from ddpctl.operations.launcher import AppContext
from ddpctl.runs import run_store
from ddpctl.runs.run_status import RunStatus, State
from ddpctl.runs.run_store import Run
from ddpwire.run_files import Outcome

CallsOf = Callable[..., list[Any]]
TAKEN = RunStatus(run="night", state="running", message="", nodes=(silent(0), machine(1), machine(2, node=0)))


@pytest.fixture
def calls_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CallsOf:
    """Call a verb on a run, and return what its target or its executor was asked for."""

    def call(verb: Callable[..., object], run: Run, *arguments: object, **options: object) -> list[Any]:
        calls: list[Any] = []
        codes: list[int] = []
        target = SimpleNamespace(
            logs=lambda _, query: calls.append(query),
            execute=lambda _, *, node, **__: calls.append(node),
        )
        executor: Any = SimpleNamespace(
            filter_stdout=lambda keep: calls.append(type(keep).__name__),
            perform=lambda verb: perform(verb, {}, calls)[1] if hasattr(verb, "send") else 0,
        )
        context = AppContext(executor=executor, root=tmp_path, emit=print)
        for module in (runs, explain):
            monkeypatch.setattr(module, "find_run", lambda *_: (context, run))
        monkeypatch.setattr(runs, "_find_going", lambda _: (context, run, TAKEN))
        monkeypatch.setattr(launcher, "target_of", lambda _: target)
        monkeypatch.setattr(launcher, "status", lambda *_: (TAKEN,))
        try:
            verb("night", *arguments, **options)
        except typer.Exit as end:
            codes.append(end.exit_code)
        assert codes in ([], [0])
        return calls

    return call


@pytest.mark.parametrize(("state", "is_asked"), [("running", True), ("stopping", True), ("starting", False)])
def test_the_ranks_of_a_run_are_asked_while_they_run(
    state: State, is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise UnavailableError("asked")

    monkeypatch.setattr(explain, "ask", ask)
    with pytest.raises(UnavailableError, match="asked") if is_asked else nullcontext():
        context: Any = None
        explain.explain_run(context, make(tmp_path, "night", 1.0), RunStatus(run="night", state=state, message=""))


@pytest.mark.parametrize(
    ("capabilities", "launched", "ends_on"),
    [({"tethered"}, True, ["SIGTERM", "SIGHUP"]), (set(), True, ["SIGTERM"]), ({"tethered"}, False, [])],
)
def test_the_signals_to_ddpctl_that_stop_a_run_are_those_of_the_launch_that_it_depends_on(
    capabilities: set[str], launched: bool, ends_on: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[str] = []
    target = SimpleNamespace(capabilities=capabilities, logs=lambda *_: None, exit_message=lambda _: "")
    monkeypatch.setattr(launcher, "target_of", lambda _: target)
    monkeypatch.setattr(launcher, "Stopper", lambda *_, ends_on, **__: signals.extend(end.name for end in ends_on))
    monkeypatch.setattr(launcher, "_ended", lambda *_: None)
    executor: Any = SimpleNamespace(perform=lambda _: None)
    context = AppContext(executor=executor, root=tmp_path, emit=print)
    launcher.follow(context, make(tmp_path, "night", 1.0), launched=launched)
    assert signals == ends_on


SPARES = JobSpec(nodes="2", spares=1)


def test_a_node_is_the_machine_that_has_taken_its_place(
    calls_of: CallsOf, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(make(tmp_path, "night", 1.0), job=SPARES)
    (query,) = calls_of(runs.logs, run, node=[0])
    assert query.nodes == (2,)
    assert calls_of(runs.execute, run, ["true"]) == [2]
    with refused(NoInputError, "--node 3", code=66):
        calls_of(runs.execute, run, ["true"], node=3)
    known = Explanation(cause="none", sentence="", fault=False, evidence=("a line",))
    monkeypatch.setattr(explain, "explain_run", lambda *_: known)
    calls_of(explain.explain, run, as_json=True)
    assert json.loads(capsys.readouterr().out)["evidence"] == ["a line", "spare 2 is node 0"]


def test_logs_of_a_run_by_hand_are_those_of_its_ranks_and_a_terminal_gets_no_escape_sequence(
    calls_of: CallsOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(make(tmp_path, "night", 1.0), job=JobSpec(nodes="2"))
    assert [calls_of(runs.logs, replace(run, handle=handle))[0].ranks for handle in ({}, {"by_hand": True})] == [
        (),
        (0, 1),
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert calls_of(runs.logs, run)[0] == "EscapeFilter"
    assert len(calls_of(runs.logs, run, raw=True)) == 1


def test_export_reads_the_checkpoints_where_they_are_with_a_python_of_this_machine(
    calls_of: CallsOf, tmp_path: Path
) -> None:
    run = replace(make(tmp_path, "night", 1.0), options={"python": "/there/python"})
    fetched = Path(run.folder, "output/checkpoints")
    fetched.mkdir(parents=True)
    (fetched / "step-00000001.pt").touch()
    here, elsewhere = (
        only(calls_of(runs.export, replace(run, handle=handle), Path("w.pt"), best=best, part="ema")).argv
        for handle, best in (({}, False), ({"logs": "box1:~/r"}, True))
    )
    verb = ("-P", "-m", "ddptrain", "export")
    assert here == ("/there/python", *verb, "--part", "ema", "--", run.checkpoint_dir, "w.pt")
    assert elsewhere == (sys.executable, *verb, "--best", "--part", "ema", "--", str(fetched), "w.pt")


def test_a_pull_waits_for_no_other_and_says_what_is_not_there_yet(tmp_path: Path) -> None:
    run = replace(make(tmp_path, "night", 1.0), kind="ssh", options={"hosts": [{"address": "b1"}]})
    context = launcher.open_context({"DDPCTL_STATE_DIR": str(tmp_path)})
    (Path(run.folder) / "launch.lock").touch()
    with refused(NoInputError, "night", code=66):
        launcher.pull(context, replace(run, uid="", handle={}))
    (Path(run.folder) / "launch.lock").unlink()
    with Path(run.folder, "pull.lock").open("w") as lock, refused(UnavailableError, "night", code=69):
        fcntl.flock(lock, fcntl.LOCK_EX)
        launcher.pull(context, run)


@pytest.mark.parametrize(("code", "wrong"), [(0, None), (78, ConfigError), (69, UnavailableError)])
def test_the_checkpoints_in_an_object_store_are_fetched_from_there(
    code: int, wrong: type[DdpctlError] | None, tmp_path: Path
) -> None:
    run = make(tmp_path, "night", 1.0)
    run = replace(run, kind="local", options={}, job=replace(run.job, checkpoint_dir="s3://bucket/night"))
    commands: list[Command] = []
    verb = launcher._pull(run, tmp_path, best=True)
    if wrong:
        with refused(wrong, "s3://bucket/night"):
            perform(verb, {"object_store": Output(returncode=code)}, commands)
    else:
        perform(verb, {}, commands)
    assert only(commands, "object_store").argv[-3:] == ("s3://bucket/night", str(tmp_path / "checkpoints"), "--best")


SAVED = Outcome(code=130, cause="stopped", message="every rank has saved")
FAILED = Outcome(code=1, cause="error", message="rank 1 failed", rank=1, node=0)
IN_STOP = replace(FAILED, cause="stopped")


@pytest.mark.parametrize(
    ("state", "expected", "names"),
    [
        ({"state": "lost", "code": 137}, ("stopped", 137), ("you",)),
        ({"state": "starting", "has_logs": False}, ("stopped", 143), ("you",)),  # deleted soon after its launch
        ({"state": "starting"}, ("starting", None), ()),
        ({"state": "stopped", "code": 130, "outcome": SAVED}, ("stopped", 130), ("you",)),
        ({"state": "stopped", "code": 1, "outcome": IN_STOP}, ("stopped", 1), ("you", "rank 1 on node 0")),
        ({"state": "failed", "code": 1, "outcome": FAILED}, ("failed", 1), ("m",)),
        ({"state": "running"}, ("running", None), ("m",)),
    ],
)  # fmt: skip
def test_what_ended_after_a_stop_is_stopped_by_who_asked_for_it(
    state: dict[str, Any], expected: tuple[str, int | None], names: tuple[str, ...], tmp_path: Path
) -> None:
    run = replace(make(tmp_path, "night", 1.0), handle={"job": "7"})
    run_store.note_stop(run, "you")
    shown = launcher._with_local_facts(run, RunStatus(run="night", **{"message": "m", **state}))
    assert (shown.state, shown.code) == expected
    assert [name for name in names if name not in shown.message] == []
    if shown.ended and not shown.outcome:  # it is known when nobody answers, and the target's silence changes nothing
        silence = RunStatus(run="night", state="unknown", message="no answer")
        assert launcher._with_local_facts(run, silence).state == shown.state


def test_stop_records_who_asked_for_it_and_kills_no_run_of_which_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = []
    target = SimpleNamespace(stop=lambda _, *, signal, **__: signals.append(signal))
    silence = RunStatus(run="night", state="unknown", message="no answer")
    monkeypatch.setattr(launcher, "target_of", lambda _: target)
    monkeypatch.setattr(launcher, "status", lambda *_: (silence,))
    monkeypatch.setattr(launcher, "SILENT_S", 0.0)
    executor: Any = SimpleNamespace(perform=lambda _: True)
    run = replace(make(tmp_path, "night", 1.0), handle={"job": "7"})
    with refused(UnavailableError, "night"):
        launcher.stop(AppContext(executor=executor, root=tmp_path, emit=print), run, kill=False)
    assert (signals, run_store.stopped_by(run)) == (["TERM"], "you (ddpctl stop)")
