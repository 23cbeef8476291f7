"""What a cell shows of its run's log, and which earlier run it continues from."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from tests.unit.ddpctl.test_notebook_session import FIELDS, write_run

from ddpctl.errors import UsageError
from ddpctl.execution.executor import Executor
from ddpctl.notebook import session
from ddpctl.notebook.session import Program, Tail
from ddpctl.operations.launcher import AppContext


def cells_function(name: str) -> Callable[..., Any]:
    """A function as a cell defines it: of __main__, its file not on disk."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(f"def {name}():\n    pass", "/tmp/ipykernel_1/2.py", "exec"), namespace)  # noqa: S102
    function = namespace[name]
    assert isinstance(function, FunctionType)
    return function


def newest(context: AppContext, program: Callable[..., Any] | str) -> str | None:
    run = session._newest(context, session.program_of(program))
    return run.name if run else None


def test_a_character_that_is_torn_between_two_reads_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "node.log"
    tail = Tail(log)
    for part in ("█".encode()[:1], "█".encode()[1:]):
        with log.open("ab") as file:
            file.write(part)
        tail.pass_on()
    assert capsys.readouterr().out == "█"
    tail.close()


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppContext:
    monkeypatch.chdir(tmp_path)
    for name in ("JPY_SESSION_NAME", "KAGGLE_KERNEL_RUN_TYPE"):
        monkeypatch.delenv(name, raising=False)
    return AppContext(executor=Executor({}), root=tmp_path, emit=print)


def test_a_function_of_that_name_in_another_notebook_is_another(
    context: AppContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    train = cells_function("train")
    for name in ("a", "b"):
        (tmp_path / f"{name}.ipynb").touch()
        monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / f"{name}.ipynb"))
        write_run(tmp_path, f"of-{name}", 1.0, session.program_of(train))
    assert newest(context, train) == "of-b"
    (tmp_path / "c.ipynb").touch()
    monkeypatch.setenv("JPY_SESSION_NAME", str(tmp_path / "c.ipynb"))
    assert newest(context, train) is None
    out = capsys.readouterr().out
    assert (str(tmp_path / "c.ipynb") in out, "resume='of-a'" in out) == (True, True)


def test_a_file_and_a_module_are_where_they_stand(context: AppContext) -> None:
    assert session.program_of(test_a_file_and_a_module_are_where_they_stand) == Program(
        f"{__name__}.test_a_file_and_a_module_are_where_they_stand()", str(Path(__file__).resolve())
    )
    assert session.program_of(Tail.end_line).name == "ddpctl.notebook.session.Tail.end_line()"


def test_a_script_is_known_by_its_path_also_where_ddpctl_launched_it(context: AppContext, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_run(tmp_path, "above", 1.0, command=("python", "./train.py", "--lr", "1"))
    write_run(tmp_path, "sub-train", 2.0, command=("train.py",), cwd=str(tmp_path / "sub"))
    write_run(tmp_path, "digits", 3.0, command=())
    assert newest(context, "train.py") == "above"
    assert newest(context, "sub/train.py") == "sub-train"
    assert newest(context, "ddptrain") == "digits"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gpus", 0),
        ("gpus", 2.5),
        ("gpus", True),
        ("ranks", 3),
        ("ranks", -1),
        ("device", "tpu"),
        ("env", {"A B": "1"}),
        ("env", {"RANK": "1"}),
        ("env", {"LR": 0.1}),
        ("env", {"LR": "\0"}),
        ("time_limit", "soon"),
        ("grace", "soon"),
        ("grace", float("nan")),
        ("hang_timeout", -1),
        ("max_restarts", 1.5),
    ],
)
def test_an_invalid_argument_of_launch_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(UsageError) as refused:
        session._job("train.py", (), {}, {**FIELDS, field: value})
    assert field in str(refused.value)


def test_resume_takes_the_newest_run_of_the_same_function(context: AppContext, tmp_path: Path) -> None:
    train, other = cells_function("train"), cells_function("other")
    assert newest(context, train) is None
    write_run(tmp_path, "first", 1.0, session.program_of(train))
    write_run(tmp_path, "second", 2.0, session.program_of(train))
    write_run(tmp_path, "others", 3.0, session.program_of(other))
    write_run(tmp_path, "script", 4.0, command=("train",))
    write_run(tmp_path, "elsewhere", 5.0, session.program_of(train), kind="slurm")
    assert newest(context, train) == "second"
    assert newest(context, partial(train, 1)) == "second"
    assert newest(context, other) == "others"
    with pytest.raises(UsageError):
        newest(context, lambda: None)
